"""A note names torch's layer_norm if it adds up gradients in bfloat16; a call in float32 is right."""

import jax.numpy as jnp
import pytest
from torch.nn.functional import layer_norm

from shardproof import scheme, values
from shardproof.experiments.narrow_kernels import name_narrow_kernels
from shardproof.experiments.notes import check_notes
from shardproof.verify_one_case import verify_case

NAMED = (
    "within what torch's layer_norm may do: on a CPU it adds rows of these gradients in bfloat16; "
    "call it with float32 tensors"
)


def norm(function, **more):
    def reference(x, weight, bias):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight[None] + bias[None]

    return scheme(
        reference=reference,
        mesh={"tp": (1, 2)},
        inputs={"x": "t/tp d", "weight": "d tp=R", "bias": "d tp=R"},
        outputs="t/tp d",
        draw=dict.fromkeys(("x", "weight", "bias"), values("normal")),
        **more,
    )(function)


def in_the_given_dtype(mesh, x, weight, bias):
    return layer_norm(x, x.shape[-1:], weight, bias)


def in_float32(mesh, x, weight, bias):
    return layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float()).to(x.dtype)


def halved_gradient(mesh, x, weight, bias):
    return in_float32(mesh, x, weight, (bias + bias.detach()) / 2)


def failing_report(function):
    """512 rows whose cotangents have one sign."""
    declared = norm(function, roundings=2)
    case = declared.case(tp=1, t=512, d=4, dtype="bfloat16")
    report = verify_case(declared, case.replace(values={**case.values, "cotangent out": {"kind": "alike"}}))
    return declared, report


@pytest.mark.usefixtures("without_line_edits")
def test_the_call_is_named():
    declared, report = failing_report(in_the_given_dtype)
    assert check_notes(declared, report).notes["d/d bias"][0] == NAMED


def test_the_wider_call_is_right():
    assert norm(in_float32).verify().ok


@pytest.mark.usefixtures("without_line_edits")
def test_another_mistake_is_not_the_kernels():
    declared, report = failing_report(halved_gradient)
    assert report.verdict == "mismatch" and name_narrow_kernels(declared, report, report.notes) == report.notes
