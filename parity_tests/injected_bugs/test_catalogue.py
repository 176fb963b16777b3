"""The catalogue is not stale, and the drawn examples catch what is in it."""

import ast
from collections import Counter

import pytest

from parity_tests.injected_bugs import report
from parity_tests.injected_bugs.catalogue import APPLICABLE, CATALOGUE
from parity_tests.injected_bugs.injected_bug import InjectedBug
from parity_tests.injected_bugs.runner import EXAMPLES, Catch, Outcome, Range, killing_run
from parity_tests.injected_bugs.symbols import patched_text

COUNTED = [fault for fault in CATALOGUE if not fault.equivalent]
PROMISED = 0.95


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_fault_is_not_stale_and_can_be_compiled(fault):
    assert fault.new != fault.old
    ast.parse(patched_text(fault).text)


def test_every_fault_has_a_name_of_its_own():
    assert [name for name, count in Counter(fault.name for fault in CATALOGUE).items() if count > 1] == []


def test_there_are_a_hundred_faults_and_three_of_each_kind():
    kinds = Counter(fault.kind for fault in COUNTED)
    assert len(COUNTED) >= 100
    assert [kind for kind in APPLICABLE if kinds[kind] < 3] == []


def test_what_was_made_elsewhere_is_here():
    libraries = {"NVIDIA/Megatron-LM #7452", "NVIDIA/TransformerEngine #1929", "NVIDIA/TransformerEngine #3331"}
    assert {"TrainVerify", *libraries} <= {fault.source for fault in CATALOGUE}


def test_an_expectation_names_an_oracle():
    failed = {"raised", "mismatch", "deadlock", "unwaited", "modified"}
    known = {"value", "gradient", "protocol", "cost", "hygiene", *failed}
    assert {fault.expect.partition(":")[0] for fault in CATALOGUE} <= known


def outcome(expect, catches=(), **more):
    fault = InjectedBug("planted", "scale", "nowhere:symbol", "2", "3", expect, **more)
    return Outcome(fault, 1, 1, catches, False, False, 0.0)


def test_what_the_catalogue_says_of_a_fault_is_held_against_what_became_of_it():
    seen = (Catch("halved", 2, ("gradient",), "forward equal, gradient not"),)
    rare = {"survives": "rare"}
    assert "told otherwise than expected: planted" in report.closing([outcome("value: ", seen)], EXAMPLES)
    assert "killed although said to survive: planted" in report.closing([outcome("value: ", seen, **rare)], EXAMPLES)
    for right in (outcome("gradient: forward equal", seen), outcome("value: ", **rare)):
        assert not [line for line in report.closing([right], EXAMPLES) if line.startswith(("told", "killed"))]


@pytest.mark.timeout(900)
def test_drawn_examples_kill_the_faults(tmp_path):
    """Every thirteenth fault; `make bugs` plants them all and writes the page."""
    outcomes = killing_run(CATALOGUE[::13], Range())
    said = "\n".join(report.closing(outcomes, EXAMPLES))
    those = report.counted(outcomes)
    assert all(outcome.concerned for outcome in outcomes), "a fault stands in code that no scheme runs"
    assert sum(outcome.killed for outcome in those) >= PROMISED * len(those), said
    assert [outcome.fault.name for outcome in those if not (outcome.killed or outcome.fault.survives)] == [], said
    assert [outcome.fault.name for outcome in outcomes if outcome.fault.equivalent and outcome.killed] == [], said
    assert [outcome.fault.name for outcome in those if outcome.fault.survives and outcome.killed] == [], said
    assert sum(o.killed for o in those) > sum(o.baseline_conduct for o in those), said
