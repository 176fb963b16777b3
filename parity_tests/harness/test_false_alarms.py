"""No false alarm: torch's own operations, with thousands of terms, in every dtype and kind of value."""

import jax
import jax.numpy as jnp
import pytest
import torch

from parity_tests.harness.declare.case import DTYPES
from parity_tests.harness.draw.choosers import seeded_chooser
from parity_tests.harness.draw.drawing import draw_case
from parity_tests.harness.verify_one_case import verify_case
from shardproof import scheme, token_below, values


def softmax(mesh, x):
    return torch.softmax(x, -1)


def logprob(mesh, x, target):
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.log_softmax(wide, -1).gather(-1, target[..., None])[..., 0]


def total(mesh, x):
    return x.sum(-1)


def product(mesh, x, w):
    return x @ w


def jax_logprob(x, target):
    return jnp.take_along_axis(jax.nn.log_softmax(x, -1), target[..., None], -1)[..., 0]


LONG = {"b": (1, 4), "v": (2, 4096), "d": (3, 4096), "f": (5,)}
CORRECT = {
    "sum": (total, lambda x: x.sum(-1), {"x": "b v tp=I"}, "b tp=I", {}),
    "softmax": (softmax, lambda x: jax.nn.softmax(x, -1), {"x": "b v tp=I"}, "b v tp=I", {}),
    "logprob": (logprob, jax_logprob, {"x": "b v tp=I", "target": "b"}, "b tp=I", {"target": token_below("v")}),
    "product": (
        product, lambda x, w: x @ w, {"x": "b d tp=I", "w": "d f tp=I"}, "b f tp=I",
        {"x": values("normal", "iota", "huge", "ties", "large"), "w": values("normal", "ties", "tiny", "large")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_no_false_alarm(name):
    function, reference, inputs, outputs, draw = CORRECT[name]
    used = {dim for spec in (*inputs.values(), outputs) for dim in spec.split()}
    declaration = scheme(
        reference=reference, mesh={"tp": (1,)}, inputs=inputs, outputs=outputs, draw=draw, dtypes=DTYPES,
        dims={dim: sizes for dim, sizes in LONG.items() if dim in used},
    )(function)  # fmt: skip
    for seed in range(40):
        report = verify_case(declaration, draw_case(declaration, seeded_chooser(seed), {}, seed=seed))
        assert report.ok, str(report)
