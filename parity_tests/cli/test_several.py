"""Schemes verified side by side end as they do in turn, failures included."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from shardproof import scheme, values, verify_case
from shardproof.cli import several
from shardproof.cli.wrong_schemes import gather_that_keeps_the_layout, projection_without_backward_sum
from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.endings.exit_status import MISMATCH
from shardproof.engines.failure import Raised
from shardproof.engines.ledger import Ledger
from shardproof.report import summary

SCHEMES = [projection_without_backward_sum, gather_that_keeps_the_layout]

DEADLY = """
import os, signal
from shardproof import scheme

@scheme(reference=lambda x: x, mesh={"tp": (1,)}, inputs={"x": "n"}, outputs="n")
def deadly(mesh, x):
    os.kill(os.getpid(), signal.SIGKILL)

@scheme(reference=lambda x: 2 * x, mesh={"tp": (1,)}, inputs={"x": "n"}, outputs="n")
def doubled(mesh, x):
    return 2 * x
"""


@pytest.mark.slow
def test_outcomes_come_in_the_order_of_the_schemes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a failing scheme leaves a replay file
    with several.workers() as started:
        outcome = several.verified(SCHEMES, 2, started)
    assert [report.scheme for report in outcome.reports] == [scheme.key for scheme in SCHEMES]
    assert outcome.status == MISMATCH
    assert "missing a sum over tp" in str(outcome.reports[0])
    assert "a layout is not undone" in str(outcome.reports[1])
    assert set(outcome.seconds) == {scheme.key for scheme in SCHEMES}


def test_seconds_are_summed_over_processes():
    """A tour prints the time on the clock as well, which is shorter."""
    outcome = summary.Outcome(seconds={"a": 2.0, "b": 3.0}, processes=2)
    assert summary.timing(outcome).startswith("0 examples in 5 s of 2 processes together, 0% of it")
    assert summary.timing(replace(outcome, processes=1)).startswith("0 examples in 5 s, 0% of it")


def test_a_report_travels_without_the_functions_of_its_scheme():
    @scheme(
        reference=lambda x: x * 2,
        mesh={"cp": (2,)},
        inputs={"x": "s/cp:backwards"},
        outputs="s/cp:backwards",
        dims={"s": (4,)},
        layouts={"backwards": lambda size, world: np.split(np.arange(size)[::-1], world)},
        draw={"x": values("normal")},
    )
    def doubled(mesh, x):
        return x * 2

    report = verify_case(doubled, doubled.case(cp=2, s=4))
    again = pickle.loads(pickle.dumps(report))
    assert str(again) == str(report)
    for tensor, travelled in zip(report.tensors, again.tensors, strict=True):
        assert travelled.owners["cp"].tolist() == tensor.owners["cp"].tolist() == [1, 1, 0, 0]
        assert travelled.coarse_budgets.tolist() == tensor.coarse_budgets.tolist()


def test_no_scheme_is_no_outcome():
    with several.workers() as started:
        assert several.verified([], 2, started).reports == []


def test_a_worker_takes_the_schemes_of_its_own_files_first():
    first, second, third, fourth = (replace(SCHEMES[0], name=file + "1", file=file) for file in ("a", "b", "b", "c"))
    waiting = [first, second, third, fourth]
    assert several.next_scheme(waiting, own={"b"}, others={"a"}) is second
    assert several.next_scheme(waiting, own={"b"}, others={"a"}) is third
    assert several.next_scheme(waiting, own={"b"}, others={"a"}) is fourth, "no other worker has imported it"
    assert several.next_scheme(waiting, own={"b", "c"}, others={"a"}) is first, "it is the only scheme left"
    assert waiting == []


@pytest.mark.slow
def test_the_other_schemes_are_verified_after_a_worker_died(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY)
    schemes = discover.schemes_of_file(str(file))
    monkeypatch.setattr(several, "MOST", 1)
    with several.workers() as started:
        outcome = several.verified(schemes, 2, started)
    (reason,) = outcome.not_judged.values()
    assert "scheme 'deadly': its process" in reason
    assert [report.ok for report in outcome.reports] == [True]


def test_a_failure_travels_with_all_its_fields():
    case = CaseSpec("some:scheme", {"tp": 2})
    fields = {"rank": 1, "op": "all_reduce", "source": "a.py:1", "case": case, "others": ("rank 0 waits",)}
    failure = Raised("rank 1 raised", **fields, ledger=Ledger())
    again = pickle.loads(pickle.dumps(failure))
    assert type(again) is Raised
    assert str(again) == str(failure)
    assert {name: getattr(again, name) for name in fields} == fields
