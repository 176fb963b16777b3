"""Schemes verified side by side end as they do in turn, failures included."""

import pickle

from parity_tests.cli import several
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.exit_status import MISMATCH
from parity_tests.harness.run.failure import Raised
from parity_tests.harness.run.ledger import Ledger
from parity_tests.injected_bugs.wrong_schemes import gather_that_keeps_the_layout, projection_without_backward_sum

SCHEMES = [projection_without_backward_sum, gather_that_keeps_the_layout]


def test_outcomes_come_in_the_order_of_the_schemes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a failing scheme leaves a replay file
    outcome = several.verified(SCHEMES, 2)
    assert [report.scheme for report in outcome.reports] == [scheme.key for scheme in SCHEMES]
    assert outcome.status == MISMATCH
    assert "missing a sum over tp" in str(outcome.reports[0])
    assert "a layout is not undone" in str(outcome.reports[1])
    assert set(outcome.seconds) == {scheme.name for scheme in SCHEMES}


def test_no_scheme_is_no_outcome():
    assert several.verified([], 2).reports == []


def test_a_failure_travels_with_all_its_fields():
    case = CaseSpec("some:scheme", {"tp": 2})
    fields = {"rank": 1, "op": "all_reduce", "source": "a.py:1", "case": case, "others": ("rank 0 waits",)}
    failure = Raised("rank 1 raised", **fields, ledger=Ledger())
    again = pickle.loads(pickle.dumps(failure))
    assert type(again) is Raised
    assert str(again) == str(failure)
    assert {name: getattr(again, name) for name in fields} == fields
