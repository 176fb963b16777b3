"""Inputs that a function takes and never applies, which no number and no small edit tells."""

import jax
import jax.numpy as jnp
import pytest

from parity_tests.specimens.noted_scheme import declared
from shardproof import integers, values
from shardproof.experiments.unused_inputs import UNUSED, name_unused_inputs
from shardproof.explain.note import Note
from shardproof.explain.places import NO_PATTERN
from shardproof.verify_one_case import verify_case

NOWHERE = Note(f"{NO_PATTERN}; worst at (0,0)")


def notes_on(function, reference, inputs, draw, *, note=NOWHERE):
    declaration = declared(
        function, reference, inputs, "b v/tp", draw={"x": values("normal"), **draw}, nograd=tuple(inputs)
    )
    report = verify_case(declaration, declaration.case(tp=2, b=6, v=8))
    assert report.verdict == "mismatch", str(report)
    return [str(each) for each in name_unused_inputs(declaration, report, [], {"out": (note,)})["out"]]


def with_a_sink(x, sink):
    return x / (1.0 + jnp.exp(x.shape[0] * sink)[:, None])


@pytest.mark.parametrize(
    ("inputs", "reference", "draw"),
    [
        ({"x": "b v/tp", "unused": "b"}, lambda x, unused: with_a_sink(x, unused), {"unused": values("normal")}),
        (
            {"x": "b v/tp", "unused": "b"},
            lambda x, unused: x * unused.astype(x.dtype)[:, None],
            {"unused": integers(1, 9)},
        ),
    ],
)
def test_an_input_that_is_never_applied_is_named_before_a_place(inputs, reference, draw):
    (note,) = notes_on(lambda mesh, x, unused: x / 2, reference, inputs, draw)
    assert note == f"{UNUSED}unused, as the reference's do"


def test_a_note_on_a_cause_stays_first():
    cause = Note("right once all_reduce at x.py:7 takes AVG, not SUM")
    reference, draw = (lambda x, unused: with_a_sink(x, unused)), {"unused": values("normal")}
    inputs = {"x": "b v/tp", "unused": "b"}
    assert notes_on(lambda mesh, x, unused: x / 2, reference, inputs, draw, note=cause) == [str(cause)]


def test_an_input_that_is_applied_wrongly_is_not_named():
    inputs, draw = {"x": "b v/tp", "w": "b"}, {"w": values("normal")}
    for function in (lambda mesh, x, w: x * w[:, None] * 3, lambda mesh, x, w: (x * w[:, None]).cos()):
        assert notes_on(function, lambda x, w: jax.nn.relu(x) * w[:, None], inputs, draw) == [str(NOWHERE)]


def test_a_result_that_follows_from_nothing_names_no_input():
    inputs, draw = {"x": "b v/tp", "w": "b"}, {"w": values("normal")}
    result = notes_on(lambda mesh, x, w: 0 * x, lambda x, w: x * w[:, None], inputs, draw)
    assert result == [str(NOWHERE)]
