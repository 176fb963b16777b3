"""The collector of reference cycles runs rarely inside `verify`, and as before after it."""

import gc

import pytest

from parity_tests.collectives.test_schemes import sum_to_replicated
from shardproof.engines.collector import THRESHOLDS
from shardproof.verification import verify


@pytest.fixture
def own_thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        pytest.param((700, 10, 10), THRESHOLDS, id="default"),
        pytest.param((0, 10, 10), (0, 10, 10), id="off"),
        pytest.param((90_000, 5, 20), (90_000, 10, 20), id="higher"),
    ],
)
def test_thresholds_are_raised_for_a_verification(own_thresholds, before, inside):
    gc.set_threshold(*before)
    seen = set()
    assert verify(sum_to_replicated, examples=2, progress=lambda *_: seen.add(gc.get_threshold())).ok
    assert (seen, gc.get_threshold()) == ({inside}, before)


def test_thresholds_are_restored_after_an_error(own_thresholds):
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="engine"):
        sum_to_replicated.verify(engine="none")
    assert gc.get_threshold() == (700, 10, 10)
