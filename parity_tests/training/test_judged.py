"""The judge of a step: errors that it must see, and differences that it must let pass."""

import math

import numpy as np
import pytest

from shardproof.judge.compare import K
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.training.judged import PROMISED, budget, distance, judged
from shardproof.training.record import Step
from shardproof.training.reference import ReferenceStep

SPREAD = 1e-6
ALLOWED = K * (SPREAD + UNIT_ROUNDOFF["float32"])


def step(factor=1.0, **changed):
    arrays = {"gradients": {"a": np.array([3.0, 4.0])}, "weights": {"a": np.array([[2.0]])}, "loss": 5.0, "norm": 2.0}
    for name in changed:
        arrays[name] = {"a": arrays[name]["a"] * factor} if isinstance(arrays[name], dict) else arrays[name] * factor
    return Step(0, **arrays)


NAMES = {"loss": "loss", "norm": "norm", "gradients": "gradient/a", "weights": "weight/a"}
KNOWN = ReferenceStep(step(), dict.fromkeys(NAMES.values(), SPREAD))


@pytest.mark.parametrize("kind", NAMES)
def test_an_error_of_twice_the_budget_is_seen_and_half_of_it_is_not(kind):
    wrong = judged(step(1 + 2 * ALLOWED, **{kind: True}), KNOWN, "float32")
    assert wrong.wrong == [NAMES[kind]] and not wrong.ok
    assert judged(step(1 + ALLOWED / 2, **{kind: True}), KNOWN, "float32").ok


def test_a_name_that_one_side_lacks_is_seen():
    lacking = Step(0, 5.0, 2.0, {}, {**step().weights, "b": np.zeros(1)})
    verdict = judged(lacking, KNOWN, "float32")
    assert verdict.wrong == ["gradient/a", "weight/b"] and verdict.worst_ratio == math.inf


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_never_near(value):
    assert distance(np.array([1.0, value]), np.array([1.0, value])) == math.inf
    assert distance(np.array(value), np.array(1.0)) == math.inf


def test_another_shape_is_never_near():
    assert distance(np.ones((2, 1)), np.ones((1, 2))) == math.inf


def test_only_zeros_are_near_zeros():
    assert distance(np.zeros(2), np.zeros(2)) == 0.0
    assert distance(np.full(2, 1e-30), np.zeros(2)) > 1.0


def test_no_budget_in_float64_is_wider_than_promised():
    assert budget(1.0, "float64") == PROMISED and budget(1.0, "float32") > 1.0
    assert budget(1e-16, "float64") < PROMISED
