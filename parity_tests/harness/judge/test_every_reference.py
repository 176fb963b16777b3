"""Every built-in reference: NumPy has a rule for all of it, its evaluation is XLA's, and it reads its inputs."""

import jax
import numpy as np
import pytest

from parity_tests.slow import every
from parity_tests.specimens.two_evaluations import evaluated_twice
from shardproof import scheme as declared
from shardproof.declare.discover import built_in
from shardproof.draw.choosers import even_chooser, seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.engines.program import Program
from shardproof.judge import kept_traces, reference

SHAPES = 2  # choices of each size: the smallest ones
BUILT_IN = built_in()
SCHEMES = {scheme.reference: scheme for scheme in BUILT_IN}  # one for each reference
EXAMPLES = 40
STEP = 8  # `make test` takes one of so many; the references are not those that a change of production changes


@pytest.fixture
def traced(monkeypatch):
    """The program that `evaluate` traces, and the arrays of the call."""
    calls = []
    chosen = reference.evaluator

    def evaluator(closed, has_tangent, compiler_options):
        program = chosen(closed, has_tangent, compiler_options)

        def recorded(arrays, *rest, **named):
            calls.append((closed, arrays))
            return program(arrays, *rest, **named)

        return recorded

    monkeypatch.setattr(reference, "evaluator", evaluator)
    monkeypatch.setattr(kept_traces, "_programs", {})
    return calls


@pytest.mark.fast_values(3)
@pytest.mark.parametrize("scheme", every(STEP, SCHEMES.values()), ids=lambda scheme: scheme.key)
def test_numpy_and_xla_agree(scheme, traced):
    case = draw_case(scheme, seeded_chooser(0), {}, seed=0, limit=SHAPES)
    reference.evaluate(scheme, Program.of(scheme), case)
    [(closed, arrays)] = traced
    assert evaluated_twice(closed, arrays, scheme.roundings) == []


def test_as_many_references_as_there_are():
    assert len(SCHEMES) > 70 and jax.config.jax_enable_x64


def moves(scheme, number):
    """Whether an output of a drawn case changes where nothing but the values of the inputs does."""
    case = draw_case(scheme, even_chooser(number), {}, seed=0)
    other = draw_case(scheme, even_chooser(number + 1), {**case.mesh, **case.dims}, seed=1)
    perturbed = case.replace(seed=other.seed, values=other.values, lengths=other.lengths)
    before, after = (reference.evaluate(scheme, Program.of(scheme), each).outputs for each in (case, perturbed))
    finite = {name: np.isfinite(before[name]) & np.isfinite(after[name]) for name in before}  # inf * 0 is NaN
    return any((before[name] != after[name])[finite[name]].any() for name in before)


@pytest.mark.fast_values(7)
@pytest.mark.parametrize("scheme", every(STEP, BUILT_IN), ids=lambda scheme: scheme.key)
def test_other_inputs_give_other_outputs(scheme):
    """A reference that reads no value of its inputs is a table of answers; a parametrized test should compare these."""
    assert any(moves(scheme, number) for number in range(EXAMPLES))


def test_a_table_of_answers_does_not_move():
    def answers(x):
        return x * 0.0 + 3.0

    def table_of_answers(mesh, x):
        return x * 0.0 + 3.0

    table = declared(reference=answers, mesh={"tp": (1, 2)}, inputs={"x": "b/tp"}, outputs="b/tp")(table_of_answers)
    assert not any(moves(table, number) for number in range(EXAMPLES))
