"""Which rows of a ledger a report blames: by the words of its sentences, each typed by hand."""

import pytest

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Cost
from parity_tests.harness.explain.note import Note
from parity_tests.harness.report.convicted import convicted
from parity_tests.harness.report.report import Report
from parity_tests.harness.run.failure import Deadlock
from parity_tests.harness.run.ledger import Ledger, LedgerRow

CASE = CaseSpec("m:f", {"tp": 2})


def row(rank, op="all_reduce", seq=0, line=28, phase="fwd"):
    what = {"dtypes": ("float32",), "shapes": ((3,),), "bytes_in": 12, "bytes_out": 12}
    return LedgerRow(rank, seq, op, (0, 1), "tp", phase=phase, source=f"my.py:{line}", **what)


ROWS = [
    row(0, seq=0), row(1, seq=0), row(0, seq=1, line=2), row(1, seq=1, line=2),
    row(0, seq=2, phase="bwd"), row(1, seq=2, phase="bwd"), row(0, "reduce", 3), row(1, "reduce", 3),
]  # fmt: skip


def blamed(**fields):
    return [ROWS.index(each) for each in convicted(Report("m:f", CASE, ledger=Ledger(ROWS), **fields))]


@pytest.mark.parametrize(
    "note, rows",
    [
        ("forward equal, gradient not: all_reduce at my.py:28 [bwd] is one too many", [4, 5]),
        ("forward equal, gradient not: the backward of all_reduce at my.py:28 lacks a sum", [0, 1]),
        ("not finite first at (0); read before its wait: all_reduce #1 at my.py:2", [2, 3]),
        ("reduce at my.py:28 is over all 2 ranks", [6, 7]),
        ("off by the constant factor 2 (= tp)", []),
    ],
)
def test_a_line_is_found_by_op_and_phase(note, rows):
    assert blamed(notes={"out": (Note(note),)}) == rows


def test_the_protocol_names_a_row_of_one_rank():
    assert blamed(protocol=(f"op differs: rank 1 issued {ROWS[5]}",)) == [5]


def test_a_failure_blames_what_its_rank_did_last_there():
    assert blamed(failure=Deadlock("no rank can run", rank=1, op="reduce", source="my.py:28")) == [7]
    assert blamed(failure=Deadlock("no rank can run", rank=1)) == []


def test_a_cost_blames_the_op_that_is_not_as_declared():
    declared = Cost({"all_reduce": (2, 24), "reduce": (1, 12)}, {"all_reduce": (2, 24)})
    assert blamed(cost=("backward all_reduce: ...",), declared_costs=(declared, declared)) == [4, 5]
