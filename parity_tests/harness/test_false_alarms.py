"""No false alarm: torch's own operations, with thousands of terms, in every dtype and kind of value."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from shardproof import scheme, token_below, values
from shardproof.declare.case import DTYPES
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.verify_one_case import verify_case
from torch_impl.collectives import all_reduce


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


@pytest.mark.fast_values(1)
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


@pytest.mark.slow
def test_a_masked_logit_over_a_drawn_temperature_leaves_its_row_a_budget():
    """The derivative of -inf / T by T is infinite, and NaN once it is multiplied by the probability 0."""
    declaration = scheme(
        reference=lambda x, t: jax.nn.softmax(x / t[:, None], -1),
        mesh={"dp": (1, 2)},
        inputs={"x": "b/dp v", "t": "b/dp"},
        outputs="b/dp v",
        draw={"x": values("neg_inf_mask"), "t": values("positive")},
        dtypes=("float32",),
    )(lambda mesh, x, t: (x / t[:, None]).softmax(-1))
    report = declaration.verify(examples=80, seed=2)
    assert report.ok and not report.undecided_examples, str(report)


def rms_of_columns(mesh, x, w):
    y = x.float() @ w.float()
    mean = all_reduce(y.square().sum(-1, keepdim=True), mesh["tp"], out="R") / mesh.total("f")
    return (y / torch.sqrt(1e-3 + mean)).to(x.dtype)


def rms_of_all_columns(x, w):
    return x @ w / jnp.sqrt(1e-3 + ((x @ w) ** 2).mean(-1, keepdims=True))


@pytest.mark.slow
def test_cancelling_gradient_addends_leave_their_roundings():
    """Each rank rounds its own addend of d/d x to bfloat16, which may be a hundred times their sum."""
    declared = scheme(
        reference=rms_of_all_columns,
        mesh={"tp": (1, 2, 4)},
        inputs={"x": "b d tp=R", "w": "d f/tp"},
        outputs="b f/tp",
        draw={"x": values("normal"), "w": values("normal")},
        reduction=("d", "f"),
        dtypes=("bfloat16",),
    )
    assert declared(rms_of_columns).verify(examples=80, seed=1).ok

    def rounded_again(mesh, x, w):
        y = rms_of_columns(mesh, x, w)
        y.register_hook(lambda g: g * (1 + 2.0**-5 * mesh.rank("tp")))
        return y

    assert not declared(rounded_again).verify(examples=20).ok


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gelu_that_cancels_in_its_tail_is_right(dtype):
    """Torch's is x / 2 * (1 + erf(x / sqrt 2)); JAX's has erfc, which is exact where that cancels."""
    declaration = scheme(
        reference=lambda x, w: jax.nn.gelu(x, approximate=False) * w,
        mesh={"tp": (1, 2)},
        inputs={"x": "b f/tp", "w": "b f/tp"},
        outputs="b f/tp",
        draw={"x": lambda rng, shape: 3 * rng.normal(size=shape), "w": values("normal")},
        dtypes=(dtype,),
    )

    def gated(approximate):
        def gelu(mesh, x, w):
            return (F.gelu(x.float(), approximate=approximate) * w.float()).to(x.dtype)

        return declaration(gelu)

    report = gated("none").verify(examples=60)
    assert report.ok and not report.undecided_examples, str(report)
    assert dtype == "bfloat16" or not gated("tanh").verify(examples=20).ok
