"""An error is one of a narrow dtype only where a tensor has that dtype."""

import jax
import jax.numpy as jnp
import pytest
import torch

from parity_tests.specimens.small_scheme import declared
from shardproof.declare.case import CaseSpec
from shardproof.experiments.narrow_tensors import narrow_dtypes
from shardproof.experiments.notes import check_notes
from shardproof.explain.note import ROUNDING
from shardproof.verify_one_case import verify_case

CASE = CaseSpec("doubled", {"tp": 2}, {"b": 16}, values={"x": {"kind": "normal"}})


def in_bfloat16(x):
    return (x.bfloat16() + x.bfloat16()).to(x.dtype)


def with_a_neighbour(x):
    """A thousandth of another element: as large as a rounding to bfloat16, and none."""
    return 2 * x + 1e-3 * x.roll(1, 0)


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize(("function", "is_narrow"), [(in_bfloat16, True), (with_a_neighbour, False)])
def test_bfloat16_accumulation_needs_a_bfloat16_tensor(function, is_narrow):
    declaration = declared(lambda mesh, x: function(x))
    report = verify_case(declaration, CASE)
    assert any("bfloat16 accumulation" in note for note in report.notes["out"])
    assert narrow_dtypes(declaration, CASE) == ({"bfloat16"} if is_narrow else set())
    if not is_narrow:
        assert "bfloat16" not in "".join(check_notes(declaration, report).notes["out"])


def half_in_float16(x):
    return x + x.half().to(x.dtype)


def cancelling(x):
    """The digits of x beyond a thousandth of float32's are lost."""
    return (x + (x + 1e3)) - 1e3


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (half_in_float16, "tensors of float16, or a formula that cancels"),
        (cancelling, "a formula that cancels"),
    ],
)
def test_a_rounding_to_float16_is_no_formula_that_cancels(function, cause):
    declaration = declared(lambda mesh, x: function(x))
    note = check_notes(declaration, verify_case(declaration, CASE)).notes["out"][0]
    assert note == f"an error of rounding, far below bfloat16 accumulation: {cause}"


@pytest.mark.usefixtures("without_line_edits")
def test_roundings_to_float16_are_none_to_bfloat16():
    declaration = declared(lambda mesh, x: (x.half() * 3.1 / 3.1 * 2.9 / 2.9 * 2.0).to(x.dtype))
    note = check_notes(declaration, verify_case(declaration, CASE)).notes["out"][0]
    assert note == "within what float16 accumulation may do"


def shifted_in_bfloat16(x):
    """An error that only bfloat16 has, and that larger inputs leave as it is."""
    return 2 * x + (0.004 * x.detach().sign() if x.dtype == torch.bfloat16 else 0.0)


def rounded_in_bfloat16(x):
    """Four roundings to bfloat16 in place of one."""
    return x * 3.1 / 3.1 * 2.9 / 2.9 * 2.0


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize(("function", "is_rounding"), [(rounded_in_bfloat16, True), (shifted_in_bfloat16, False)])
def test_an_error_of_rounding_grows_with_the_inputs(function, is_rounding):
    declaration = declared(lambda mesh, x: function(x), dtypes=("bfloat16",), roundings=0)
    report = verify_case(declaration, CASE.replace(dtype="bfloat16"))
    assert any(note.scope == ROUNDING for note in report.notes["out"]), report.notes
    notes = check_notes(declaration, report).notes["out"]
    assert any(note.scope == ROUNDING for note in notes) == is_rounding, notes


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize("seed", range(4))
def test_rounded_scores_of_a_softmax(seed):
    """Of scores that are 16 times as large the softmax is 0 or 1, and tells nothing of its roundings."""
    softmax = declared(
        lambda mesh, x: (4 * rounded_in_bfloat16(x)).softmax(-1),
        reference=lambda x: jax.nn.softmax(8 * x),
        inputs={"x": "b/tp d"}, outputs="b/tp d", nograd=("x",), dtypes=("bfloat16", "float32"), roundings=0,
    )  # fmt: skip
    case = CASE.replace(scheme=softmax.key, dims={"b": 4, "d": 6}, dtype="bfloat16", seed=seed)
    note = check_notes(softmax, verify_case(softmax, case)).notes["out"][0]
    assert note.startswith("within what ") and "to bfloat16 may do" in note


@pytest.mark.usefixtures("without_line_edits")
def test_a_budget_that_cancels_does_not_hide_a_rounding():
    """Rows of two have a gradient of almost nothing; torch keeps their mean and deviation in bfloat16 for it."""

    def reference(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)

    norm = declared(
        lambda mesh, x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        reference=reference, inputs={"x": "b/tp d"}, outputs="b/tp d", dtypes=("bfloat16", "float32"),
    )  # fmt: skip
    case = CASE.replace(scheme=norm.key, dims={"b": 2, "d": 2}, values={"x": {"kind": "alike"}}, dtype="bfloat16")
    note, _ = check_notes(norm, verify_case(norm, case)).notes["d/d x"]
    assert note == "within what 2 roundings to bfloat16 may do: declare roundings=2 if they are meant"
