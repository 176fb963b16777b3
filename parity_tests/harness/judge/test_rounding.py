"""Each operation adds its own error, which the chain rule propagates: compared with derivations by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardproof.judge import bridge
from shardproof.judge.control_flow import MAX_SCAN_OPERATIONS
from shardproof.judge.primitives import RULES
from shardproof.judge.rounding import LARGE, POOL, Trace, TracedProgram, by_numpy, by_xla, evaluator
from shardproof.judge.step import DIRECTIONS

EVALUATIONS = {"numpy": by_numpy, "xla": lambda trace, has_tangent: by_xla(trace, has_tangent, dict)}


@pytest.fixture(autouse=True, scope="module")
def start_bridge():
    bridge.start()


@pytest.fixture(params=EVALUATIONS)
def rounding_errors(request):
    """The first tangent of a function's value; without `tangents` of the inputs it has the operations' errors alone."""

    def derivative(function, *arguments, unit=1.0, tangents=None, seed=0):
        signs = 2.0 * np.random.default_rng(seed).integers(0, 2, size=(DIRECTIONS, POOL)) - 1.0
        arguments = [np.asarray(x, dtype=np.float64) for x in arguments]
        zeros = [np.zeros((DIRECTIONS, *x.shape)) for x in arguments]
        along = zeros if tangents is None else [z + t for z, t in zip(zeros, tangents, strict=True)]
        program = EVALUATIONS[request.param](Trace(jax.make_jaxpr(function)(*arguments)), [True] * len(arguments))
        [value], [tangent] = program(arguments, along, unit * signs)
        return np.zeros(value.shape) if tangent is None else np.asarray(tangent[0])

    return derivative


X = np.array([0.5, -2.0, 3.0, 100.0])


def test_an_operation_adds_a_rounding_of_its_result(rounding_errors):
    assert np.abs(rounding_errors(lambda x: x * x, X)).tolist() == (X * X).tolist()
    assert np.abs(rounding_errors(jnp.exp, X[:3], unit=2.0**-10)).tolist() == (np.exp(X[:3]) * 2.0**-10).tolist()
    assert set(np.sign(rounding_errors(lambda x: x * x, np.ones(100)))) == {-1.0, 1.0}


@pytest.mark.fast_values(9)
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
def test_permutations_and_selections_are_exact(rounding_errors, function):
    assert not rounding_errors(function, X).any()


def test_errors_travel_by_the_chain_rule(rounding_errors):
    """y = exp(x*x): the product's error e1 x^2 is multiplied by exp(x^2), the exponential adds e2 exp(x^2)."""
    x = np.array([0.5, 1.0, 1.5])
    y, square = np.exp(x * x), x * x
    errors = rounding_errors(lambda x: jnp.exp(x * x), x) / y
    possible = np.stack([first * square + second for first in (-1, 1) for second in (-1, 1)])
    assert (np.abs(errors - possible).min(axis=0) < 2.0**-50 * possible.max()).all()


def test_errors_are_added_to_the_tangent(rounding_errors):
    assert rounding_errors(lambda x: 3.0 * x, X, tangents=[np.ones(4)], unit=0.0).tolist() == [3.0] * 4
    tangent = rounding_errors(lambda x: 3.0 * x, X, tangents=[np.ones(4)])
    assert np.abs(tangent - 3.0).tolist() == np.abs(3.0 * X).tolist()


def test_a_difference_of_equals_keeps_the_errors_of_both(rounding_errors):
    """Rounding only the inputs cannot show this: 3x - 3x is zero, and so is its derivative."""
    errors = rounding_errors(lambda x: 3.0 * x - (x + x + x), X)
    assert (np.abs(errors) > 0).any()
    assert np.abs(errors).max() <= 3 * 3.0 * np.abs(X).max()


def test_operations_round_independently(rounding_errors):
    two = rounding_errors(lambda x: jnp.stack([x * 1.5, x * 2.5]), np.ones(200)) / np.array([[1.5], [2.5]])
    assert 0.3 < (two[0] == two[1]).mean() < 0.7
    assert not np.array_equal(
        rounding_errors(lambda x: x * x, np.ones(200)), rounding_errors(lambda x: x * x, np.ones(200), seed=1)
    )


def test_functions_inside_functions(rounding_errors):
    inner = jax.jit(lambda x: x * x)
    assert np.abs(rounding_errors(lambda x: inner(x), X)).tolist() == (X * X).tolist()
    looped = rounding_errors(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2.0, x), X)
    assert np.abs(looped).tolist() == np.abs(8.0 * X).tolist()  # a loop is one operation
    chosen = rounding_errors(lambda x: jax.lax.cond(x[0] > 0, lambda x: x * 2.0, lambda x: x, x), X)
    assert np.abs(chosen).tolist() == np.abs(2.0 * X).tolist()


def test_infinities_and_larger_arrays_than_the_pool(rounding_errors):
    errors = rounding_errors(lambda x: x * 2.0, np.array([1.0, np.inf, -np.inf]))
    assert np.abs(errors).tolist() == [2.0, 0.0, 0.0]
    assert np.abs(rounding_errors(lambda x: x * 2.0, np.ones(3 * POOL))).tolist() == [2.0] * (3 * POOL)
    assert rounding_errors(lambda x: x * 2.0, np.zeros((0, 3))).shape == (0, 3)


def test_an_output_that_depends_on_no_input(rounding_errors):
    assert rounding_errors(lambda x: jnp.zeros(3), X).tolist() == [0.0] * 3


def test_an_operation_without_a_numpy_rule_is_compiled(monkeypatch):
    """The rule may lack the primitive, a parameter or a dtype. A program of large arrays is compiled too."""

    def has_rules(function, *arguments):
        return isinstance(evaluator(jax.make_jaxpr(function)(*arguments), [True], dict), TracedProgram)

    assert has_rules(jnp.sin, X)
    assert has_rules(jax.grad(lambda x: lax.scan(lambda c, e: (c * e, c), x.sum(), x)[1].sum()), X)
    assert not has_rules(lambda x: jnp.linalg.cholesky(x * jnp.eye(4)), X[:, None])
    assert not has_rules(lambda x: jnp.abs(jnp.fft.fft(x)), X)
    assert not has_rules(lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype), X)
    assert not has_rules(
        lambda x: lax.scan(lambda c, e: (jnp.sin(c), e), 1.0, None, length=2 * MAX_SCAN_OPERATIONS)[0] * x, X
    )
    assert not has_rules(jnp.sin, jax.ShapeDtypeStruct((LARGE + 1,), X.dtype))
    monkeypatch.delitem(RULES, "sin")
    assert not has_rules(jnp.sin, X)


@pytest.mark.parametrize("missing", ["sin", "mul", "cond", "dot_general"])
def test_a_missing_rule_changes_no_verdict(missing, monkeypatch):
    def function(x):
        y = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x) * x
        return y @ y[:, None] * x

    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(DIRECTIONS, POOL))
    tangents = 1e-9 * signs[:, : len(X)]

    def results():
        program = evaluator(jax.make_jaxpr(function)(X), [True], dict)
        values, result_tangents = program([X], [tangents], 1e-9 * signs)
        return isinstance(program, TracedProgram), np.asarray(values[0]), np.asarray(result_tangents[0])

    by_rule = results()
    monkeypatch.delitem(RULES, missing)
    compiled = results()
    assert by_rule[0] and not compiled[0]
    for ours, theirs in zip(by_rule[1:], compiled[1:], strict=True):
        assert (np.abs(ours - theirs) <= len(X) * 2.0**-40 * np.abs(theirs).max()).all()
