"""Which rows of a ledger a report blames: by the call sites of its notes and findings, each written by hand."""

import pickle
from dataclasses import replace

import pytest

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Cost
from shardproof.engines.failure import Deadlock
from shardproof.engines.ledger import CallSite, Finding, Ledger, LedgerRow
from shardproof.engines.protocol import disagreement
from shardproof.explain.note import Note
from shardproof.report.blamed_rows import blamed_rows
from shardproof.report.report import Report

CASE = CaseSpec("m:f", {"tp": 2})


def row(rank, op="all_reduce", seq=0, line=28, phase="fwd"):
    what = {"dtypes": ("float32",), "shapes": ((3,),), "bytes_in": 12, "bytes_out": 12}
    return LedgerRow(rank, seq, op, (0, 1), "tp", phase=phase, source=f"my.py:{line}", **what)


ROWS = [
    row(0, seq=0), row(1, seq=0), row(0, seq=1, line=2), row(1, seq=1, line=2),
    row(0, seq=2, phase="bwd"), row(1, seq=2, phase="bwd"), row(0, "reduce", 3), row(1, "reduce", 3),
]  # fmt: skip


def blamed(**fields):
    return [ROWS.index(each) for each in blamed_rows(Report("m:f", CASE, ledger=Ledger(ROWS), **fields))]


@pytest.mark.parametrize(
    "site, rows",
    [
        (CallSite("all_reduce", "my.py:28", "bwd"), [4, 5]),
        (CallSite("all_reduce", "my.py:28"), [0, 1]),
        (CallSite("all_reduce", "my.py:2", seq=1), [2, 3]),
        (CallSite("all_reduce", "my.py:2", seq=0), []),
        (CallSite("reduce", "my.py:28"), [6, 7]),
        (CallSite("reduce", "my.py:28", rank=1), [7]),
        (CallSite("reduce", "my.py:28", group=(0,)), []),
    ],
)
def test_a_note_blames_the_rows_of_its_sites(site, rows):
    assert blamed(notes={"out": (Note("a sentence", sites=(site,)),)}) == rows
    assert blamed(notes={"out": (Note("a sentence").extended(", of which more is known", (site,)),)}) == rows


def test_a_note_without_a_site_blames_nothing():
    assert blamed(notes={"out": (Note("all_reduce at my.py:28 is over all 2 ranks"),)}) == []


def test_the_protocol_blames_a_row_of_one_rank():
    assert blamed(protocol=(Finding("op differs", (CallSite.of(ROWS[5]),)),)) == [5]
    odd = replace(ROWS[7], dtypes=("int64",))
    assert disagreement(Ledger([ROWS[6], odd])).finding.sites == (CallSite.of(odd),)


def test_a_finding_travels_with_its_sites():
    finding = Finding("op differs", (CallSite.of(ROWS[5]),))
    note = Note("a sentence", sites=finding.sites)
    for each in (finding, note):
        again = pickle.loads(pickle.dumps(each))
        assert (type(again), again, again.sites) == (type(each), each, each.sites)


def test_a_failure_blames_its_ranks_last_row_there():
    assert blamed(failure=Deadlock("no rank can run", rank=1, op="reduce", source="my.py:28")) == [7]
    assert blamed(failure=Deadlock("no rank can run", rank=1)) == []


def test_a_cost_blames_the_op_that_is_not_as_declared():
    declared = Cost({"all_reduce": (2, 24), "reduce": (1, 12)}, {"all_reduce": (2, 24)})
    assert blamed(cost=("backward all_reduce: ...",), declared_costs=(declared, declared)) == [4, 5]
