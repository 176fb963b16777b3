"""If a gradient lacks a sum and no collective is to blame, a note names the line whose backward lacks the sum."""

import inspect

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from shardproof import scheme, values
from torch_impl.collectives import all_reduce


class Linear(torch.autograd.Function):
    """A product with a shard of columns, whose backward does not sum the gradient of x over the ranks."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @once_differentiable  # torch's wrapper: the note must not name its lines
    def backward(ctx, cotangent):
        x, w = ctx.saved_tensors
        return cotangent @ w.T, x.T @ cotangent


def product(x, w):
    return x @ w


def normed_product(x, g, w):
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-2) * g[None]) @ w


def handwritten(mesh, x, w):
    return Linear.apply(x, w)


def plain(mesh, x, w):
    return x @ w


def behind_a_norm(mesh, x, g, w):
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-2) * g
    return Linear.apply(y, w)


def two_products(mesh, x, w, u):
    first = x @ w
    second = x @ u
    return first, second


def right_product_beside_a_wrong_one(mesh, x, w, u):
    y = x.clone()
    y.register_hook(lambda gradient: _total(gradient, mesh["tp"]))
    first = y @ w
    second = x @ u
    return first, second


def _total(gradient, group):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def both(x, w, u):
    return x @ w, x @ u


LINEAR_BACKWARD = ("Linear", inspect.unwrap(Linear.backward), "def backward")
CASES = {
    "handwritten": (handwritten, product, {"x": [LINEAR_BACKWARD]}),
    "plain": (plain, product, {"x": [("mm", plain, "return x @ w")]}),
    "behind a norm": (behind_a_norm, normed_product, {"x": [LINEAR_BACKWARD], "g": [LINEAR_BACKWARD]}),
    "two": (
        two_products,
        both,
        {"x": [("mm", two_products, "first = x @ w"), ("mm", two_products, "second = x @ u")]},
    ),
}


def wrong(function, reference):
    specs = {"x": "b d tp=I", "g": "d tp=I", "w": "d n/tp", "u": "d n/tp"}
    names = list(inspect.signature(reference).parameters)
    outputs = ("b n/tp", "b n/tp") if "u" in names else "b n/tp"
    return scheme(
        reference=reference,
        mesh={"tp": (2, 3)},
        inputs={name: specs[name] for name in names},
        outputs=outputs,
        dtypes=("float32",),
        draw={name: values("normal") for name in names},
    )(function)


def line_number(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def sentence(places):
    named = " and ".join(
        f"{operation} at test_unsummed_edges.py:{line_number(function, text)}" for operation, function, text in places
    )
    return f"forward equal, gradient not: the backward of {named} lacks a sum over tp"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_line_is_named(name):
    function, reference, places_of_input = CASES[name]
    report = wrong(function, reference).verify()
    assert report.verdict == "mismatch"
    for label, places in places_of_input.items():
        assert sentence(places) in report.notes[f"d/d {label}"]


@pytest.mark.slow
def test_a_use_with_its_own_sum_is_not_named():
    function = right_product_beside_a_wrong_one
    notes = wrong(function, both).verify().notes["d/d x"]
    assert sentence([("mm", function, "second = x @ u")]) in notes


def over_the_norm(mesh, w):
    norm = all_reduce(w.square().sum(), mesh["tp"]).sqrt()
    return w / norm, norm


def over_one_norm(mesh, w, bias):
    norm = (all_reduce(w.square().sum(), mesh["tp"]) + bias.square().sum()).sqrt()
    return w / norm, bias / norm


def normed(w):
    norm = jnp.sqrt((w**2).sum())
    return w / norm, norm


def both_normed(w, bias):
    norm = jnp.sqrt((w**2).sum() + (bias**2).sum())
    return w / norm, bias / norm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "reference", "outputs"),
    [(over_the_norm, normed, ("n/tp", "tp=I")), (over_one_norm, both_normed, ("n/tp", "d tp=I"))],
)
def test_a_norm_is_named_where_it_scales_a_shard(function, reference, outputs):
    """The norm may also scale a replica on the same line; the cotangents of the replica need no sum."""
    inputs = {"w": "n/tp", "bias": "d tp=I"}
    names = list(inspect.signature(reference).parameters)
    declared = scheme(
        reference=reference, mesh={"tp": (2, 3)}, inputs={name: inputs[name] for name in names}, outputs=outputs,
        dtypes=("float32",), draw={name: values("normal") for name in names}, reduction=("n", "d")[: len(names)],
    )(function)  # fmt: skip
    notes = declared.verify().notes
    assert all(sentence([("div", function, "return w / norm")]) in notes[f"d/d {name}"] for name in names), notes


@pytest.mark.slow
def test_infinities_do_not_hide_wrong_elements():
    """If every weight of a column is -inf, its gradient is undefined, and only the replicas' bits show the mistake."""
    declared = scheme(
        reference=lambda x, w: jnp.exp(x @ w), mesh={"tp": (2,)}, inputs={"x": "b d tp=I", "w": "d n/tp"},
        outputs="b n/tp", dtypes=("float32",),
    )(lambda mesh, x, w: torch.exp(x @ w))  # fmt: skip
    assert all(declared.verify(seed=seed).verdict == "mismatch" for seed in range(4))
