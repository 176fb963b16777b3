"""Every built-in reference: NumPy has a rule for all of it, and its evaluation is XLA's."""

import jax
import pytest

from parity_tests.harness.declare.discover import built_in
from parity_tests.harness.draw.choosers import seeded_chooser
from parity_tests.harness.draw.drawing import draw_case
from parity_tests.harness.judge import reference
from parity_tests.harness.run.program import Program
from parity_tests.specimens.two_evaluations import evaluated_twice

SHAPES = 2  # choices of each size: the smallest ones
SCHEMES = {scheme.reference: scheme for scheme in built_in()}  # one for each reference


@pytest.fixture
def traced(monkeypatch):
    """The program that `evaluate` traces, and the arrays of the call."""
    calls = []
    chosen = reference.evaluator

    def evaluator(closed, has_tangent, compiler_options):
        program = chosen(closed, has_tangent, compiler_options)

        def recorded(arrays, *rest):
            calls.append((closed, arrays))
            return program(arrays, *rest)

        return recorded

    monkeypatch.setattr(reference, "evaluator", evaluator)
    monkeypatch.setattr(reference, "_PROGRAMS", {})
    return calls


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.key)
def test_numpy_and_xla_agree(scheme, traced):
    case = draw_case(scheme, seeded_chooser(0), {}, seed=0, limit=SHAPES)
    reference.evaluate(scheme, Program.of(scheme), case)
    [(closed, arrays)] = traced
    assert evaluated_twice(closed, arrays) == []


def test_as_many_references_as_there_are():
    assert len(SCHEMES) > 70 and jax.config.jax_enable_x64
