"""Inputs that a function takes but never uses; neither numbers nor small edits show them."""

import jax
import jax.numpy as jnp
import pytest

from parity_tests.specimens.noted_scheme import declared
from shardproof import integers, offsets, values
from shardproof.engines.program import Program
from shardproof.experiments.unused_inputs import UNUSED, UNUSED_HERE, name_unused_inputs
from shardproof.explain.note import Note
from shardproof.explain.places import NO_PATTERN
from shardproof.verify_one_case import verify_case

NOWHERE = Note(f"{NO_PATTERN}; worst at (0,0)")


def notes_on(function, reference, inputs, draw, *, note=NOWHERE, outputs="b v/tp", label="out", seed=0):
    declaration = declared(
        function, reference, inputs, outputs, draw={"x": values("normal"), **draw}, nograd=tuple(inputs)
    )
    report = verify_case(declaration, declaration.case(tp=2, b=6, v=8, seed=seed))
    assert report.verdict == "mismatch", str(report)
    return [str(each) for each in name_unused_inputs(declaration, report, [], {label: (note,)})[label]]


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
def test_an_unused_input_is_named_before_a_place(inputs, reference, draw):
    (note,) = notes_on(lambda mesh, x, unused: x / 2, reference, inputs, draw)
    assert note == f"{UNUSED}unused, as the reference's do"


def test_a_note_on_a_cause_stays_first():
    cause = Note("right once all_reduce at x.py:7 takes AVG, not SUM")
    reference, draw = (lambda x, unused: with_a_sink(x, unused)), {"unused": values("normal")}
    inputs = {"x": "b v/tp", "unused": "b"}
    assert notes_on(lambda mesh, x, unused: x / 2, reference, inputs, draw, note=cause) == [str(cause)]


def test_an_input_that_is_used_wrongly_is_not_named():
    inputs, draw = {"x": "b v/tp", "w": "b"}, {"w": values("normal")}
    for function in (lambda mesh, x, w: x * w[:, None] * 3, lambda mesh, x, w: (x * w[:, None]).cos()):
        assert notes_on(function, lambda x, w: jax.nn.relu(x) * w[:, None], inputs, draw) == [str(NOWHERE)]


def test_a_constant_result_names_no_input():
    inputs, draw = {"x": "b v/tp", "w": "b"}, {"w": values("normal")}
    result = notes_on(lambda mesh, x, w: 0 * x, lambda x, w: x * w[:, None], inputs, draw)
    assert result == [str(NOWHERE)]


def test_an_input_that_is_only_summed_is_not_named():
    inputs, draw = {"x": "b v/tp", "n": "b"}, {"n": integers(1, 9)}
    reference = lambda x, n: x * n.astype(x.dtype)[:, None]  # noqa: E731
    assert notes_on(lambda mesh, x, n: x * n.sum(), reference, inputs, draw) == [str(NOWHERE)]


def test_an_input_that_one_output_uses_is_named_for_the_other():
    def reference(x, sink):
        return x * sink[:, None], with_a_sink(x, sink)

    inputs, draw = {"x": "b v/tp", "sink": "b"}, {"sink": values("normal")}
    function = lambda mesh, x, sink: (x * sink[:, None], x / 2)  # noqa: E731
    (note,) = notes_on(function, reference, inputs, draw, outputs=("b v/tp", "b v/tp"), label="out[1]")
    assert note == f"out[1]{UNUSED_HERE}sink, as the reference's does"


def test_unread_borders_of_sequences_are_named():
    inputs, draw = {"x": "b v/tp", "cu": "n"}, {"cu": offsets("b", empty=False)}
    (note,) = notes_on(lambda mesh, x, cu: x, lambda x, cu: x * cu[1].astype(x.dtype), inputs, draw, seed=3)
    assert note == f"{UNUSED}cu, as the reference's do"


def test_a_function_that_raises_for_other_values_reads_them():
    def function(mesh, x, index):
        return x if int(index.sum()) == given else [][0]

    inputs, draw = {"x": "b v/tp", "index": "b"}, {"index": integers(1, 9)}
    reference = lambda x, index: x * index.astype(x.dtype)[:, None]  # noqa: E731
    declaration = declared(lambda mesh, x, index: x, reference, inputs, "b v/tp", draw=draw)
    case = declaration.case(tp=2, b=6, v=8)
    index = next(arg for arg in declaration.inputs if arg.name == "index")
    given = int(Program.of(declaration).full_array(index, case).sum())
    assert notes_on(function, reference, inputs, draw) == [str(NOWHERE)]
