"""The catalogue is not stale; `make faults` plants what is in it and counts what is caught."""

import ast
from collections import Counter

import pytest

from parity_tests.faults.catalogue import APPLICABLE, CATALOGUE
from parity_tests.faults.patch import patched_text

COUNTED = [fault for fault in CATALOGUE if not fault.equivalent]


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda fault: fault.name)
def test_a_fault_is_not_stale_and_can_be_compiled(fault):
    assert fault.new != fault.old
    ast.parse(patched_text(fault))


def test_every_fault_has_a_name_of_its_own():
    assert [name for name, count in Counter(fault.name for fault in CATALOGUE).items() if count > 1] == []


def test_there_are_a_hundred_faults_and_three_of_each_kind():
    kinds = Counter(fault.kind for fault in COUNTED)
    assert len(COUNTED) >= 100
    assert [kind for kind in APPLICABLE if kinds[kind] < 3] == []


def test_what_was_made_elsewhere_is_here():
    assert {fault.source for fault in CATALOGUE} == {None, "TrainVerify", "NVIDIA/Megatron-LM #7452"}


def test_an_expectation_names_an_oracle():
    known = {"value", "gradient", "protocol", "cost", "hygiene", "raised", "mismatch", "deadlock", "unwaited"}
    assert {fault.expect.partition(":")[0] for fault in CATALOGUE} <= known
