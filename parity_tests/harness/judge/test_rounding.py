"""Each operation adds an error of its own, and it travels by the chain rule: against derivations by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity_tests.harness.judge import bridge
from parity_tests.harness.judge.rounding import POOL, derivative_with_rounding


@pytest.fixture(autouse=True, scope="module")
def started():
    bridge.start()


def moved(function, *arguments, unit=1.0, tangents=None, seed=0):
    """The derivative along nothing, so that what is left is the errors of the operations."""
    signs = 2.0 * np.random.default_rng(seed).integers(0, 2, size=POOL) - 1.0
    arguments = [jnp.asarray(x, dtype=jnp.float64) for x in arguments]
    still = [jnp.zeros_like(x) for x in arguments] if tangents is None else [jnp.asarray(t) for t in tangents]
    return np.asarray(derivative_with_rounding(function, arguments, still, unit, jnp.asarray(signs)))


X = np.array([0.5, -2.0, 3.0, 100.0])


def test_one_operation_errs_by_its_result():
    assert np.abs(moved(lambda x: x * x, X)).tolist() == (X * X).tolist()
    assert np.abs(moved(jnp.exp, X[:3], unit=2.0**-10)).tolist() == (np.exp(X[:3]) * 2.0**-10).tolist()
    assert set(np.sign(moved(lambda x: x * x, np.ones(100)))) == {-1.0, 1.0}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: -x,
        lambda x: x[::-1],
        lambda x: jnp.maximum(x, 0.0),
        lambda x: x.reshape(2, 2).T,
        lambda x: jnp.where(x > 0, x, 1.0),
        lambda x: jnp.sort(x),
        lambda x: jnp.concatenate([x, jnp.abs(x)]),
        lambda x: x[jnp.array([0, 0, 3])],
        lambda x: jax.lax.stop_gradient(x),
        lambda x: x.max(-1),
    ],
)
def test_what_moves_or_chooses_numbers_is_exact(function):
    assert not moved(function, X).any()


def test_errors_travel_by_the_chain_rule():
    """y = exp(x*x): the product's error e1 x^2 is multiplied by exp(x^2), the exponential adds e2 exp(x^2)."""
    x = np.array([0.5, 1.0, 1.5])
    y, square = np.exp(x * x), x * x
    errors = moved(lambda x: jnp.exp(x * x), x) / y
    possible = np.stack([first * square + second for first in (-1, 1) for second in (-1, 1)])
    assert (np.abs(errors - possible).min(axis=0) < 2.0**-50 * possible.max()).all()


def test_errors_are_added_to_the_tangent():
    assert moved(lambda x: 3.0 * x, X, tangents=[np.ones(4)], unit=0.0).tolist() == [3.0] * 4
    tangent = moved(lambda x: 3.0 * x, X, tangents=[np.ones(4)])
    assert np.abs(tangent - 3.0).tolist() == np.abs(3.0 * X).tolist()


def test_a_difference_of_equals_keeps_the_errors_of_both():
    """What rounding the inputs alone cannot see: 3x - 3x is zero, and so is its derivative."""
    errors = moved(lambda x: 3.0 * x - (x + x + x), X)
    assert (np.abs(errors) > 0).any()
    assert np.abs(errors).max() <= 3 * 3.0 * np.abs(X).max()


def test_operations_round_independently():
    two = moved(lambda x: jnp.stack([x * 1.5, x * 2.5]), np.ones(200)) / np.array([[1.5], [2.5]])
    assert 0.3 < (two[0] == two[1]).mean() < 0.7
    assert not np.array_equal(moved(lambda x: x * x, np.ones(200)), moved(lambda x: x * x, np.ones(200), seed=1))


def test_functions_inside_functions():
    inner = jax.jit(lambda x: x * x)
    assert np.abs(moved(lambda x: inner(x), X)).tolist() == (X * X).tolist()
    looped = moved(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2.0, x), X)
    assert np.abs(looped).tolist() == np.abs(8.0 * X).tolist()  # a loop is one operation
    chosen = moved(lambda x: jax.lax.cond(x[0] > 0, lambda x: x * 2.0, lambda x: x, x), X)
    assert np.abs(chosen).tolist() == np.abs(2.0 * X).tolist()


def test_infinities_and_larger_arrays_than_the_pool():
    errors = moved(lambda x: x * 2.0, np.array([1.0, np.inf, -np.inf]))
    assert np.abs(errors).tolist() == [2.0, 0.0, 0.0]
    assert np.abs(moved(lambda x: x * 2.0, np.ones(3 * POOL))).tolist() == [2.0] * (3 * POOL)
    assert moved(lambda x: x * 2.0, np.zeros((0, 3))).shape == (0, 3)


def test_an_output_that_nothing_moves():
    assert moved(lambda x: jnp.zeros(3), X).tolist() == [0.0] * 3
