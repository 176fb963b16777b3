"""A choice that rounding decides is undecided: neither equal nor a mismatch. A mistake beside it is a mismatch."""

import numpy as np
import pytest

from jax_ref import expert_parallel as reference
from shardproof import scheme, values
from torch_impl.expert_parallel import routed_experts, softmax_top_k

SIZES = {"t": 4, "d": 2, "e": 2, "f": 4, "two": 2}


def nearly_equal_columns(generator, shape):
    """Of tokens of ones the second logit is larger by 2^-26, which float32 rounds away and float64 does not."""
    return np.array([[1.0, 1.0], [0.0, 2.0**-26]])


def routed_in_float64(x, router, gate_up, down):
    gates, experts, _ = reference.softmax_top_k(x @ router, 1)
    return reference.mixture(x, gates, experts, gate_up, down)


def report_of(scale):
    @scheme(
        reference=routed_in_float64,
        mesh={"ep": (1, 2)},
        inputs={"x": "t/ep d", "router": "d e ep=R", "gate_up": "e/ep d two f", "down": "e/ep f d"},
        outputs="t/ep d",
        dims={name: (size,) for name, size in SIZES.items() if name != "t"},
        draw={
            "x": values("ones"),
            "router": nearly_equal_columns,
            **dict.fromkeys(("gate_up", "down"), values("normal")),
        },
        dtypes=("float32",),
        roundings=6,
    )
    def nearly_tied(mesh, x, router, gate_up, down):
        gates, experts, _ = softmax_top_k(x @ router, 1)
        return scale * routed_experts(x, gates, experts, gate_up.flatten(2), down, mesh["ep"])

    return nearly_tied.verify(ep=2, **SIZES, inside_subgroup=False)


def test_a_choice_that_rounding_decides_is_undecided():
    report = report_of(1.0)
    assert report.verdict == "undecided" and not report.failed, str(report)


@pytest.mark.parametrize("scale", [2.0, -1.0])
def test_a_mistake_beside_it_is_a_mismatch(scale):
    report = report_of(scale)
    assert report.failed and report.verdict != "undecided", str(report)
