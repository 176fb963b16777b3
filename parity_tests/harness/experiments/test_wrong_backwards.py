"""A hand-written backward is named if it is not the derivative of its forward."""

import inspect

import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.small_scheme import declared, summed
from shardproof import values


class Exponentials(torch.autograd.Function):
    """Its backward is right for a plain exponential, and ignores the shift by the maximum."""

    @staticmethod
    def forward(ctx, x, group):
        row_max = x.amax(-1, keepdim=True)
        dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=group)
        weights = (x - row_max).exp()
        ctx.save_for_backward(weights)
        ctx.set_materialize_grads(False)
        return weights

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0], None


class Doubled(torch.autograd.Function):
    """In the style of functorch; its gradient is right."""

    @staticmethod
    def forward(x):
        return 2.0 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return 2.0 * cotangent


class Shifted(torch.autograd.Function):
    """In the style of functorch; its gradient has a factor too many."""

    @staticmethod
    def forward(x):
        return x * x + 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0] ** 2


class Halved(torch.autograd.Function):
    """A square; its gradient lacks a factor of 2."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0]


class Exchanged(torch.autograd.Function):
    """Its forward hands squares to other ranks by a plain collective; its backward leaves out the square."""

    is_async = False

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        sent = [part.contiguous() for part in (x * x).chunk(dist.get_world_size(group), -1)]
        received = [torch.empty_like(part) for part in sent]
        work = dist.all_to_all(received, sent, group=group, async_op=Exchanged.is_async)
        if work is not None:
            work.wait()
        return torch.cat(received, 0)

    @staticmethod
    def backward(ctx, cotangent):
        sent = list(cotangent.chunk(dist.get_world_size(ctx.group), 0))
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, [part.contiguous() for part in sent], group=ctx.group)
        return torch.cat(received, -1), None


def normalised(mesh, x, w):
    weights = Exponentials.apply(Doubled.apply(x), mesh["tp"])
    return summed((weights * w).sum(-1), mesh["tp"])


def normalised_reference(x, w):
    return (jnp.exp(2.0 * x - 2.0 * x.max(-1, keepdims=True)) * w).sum(-1)


def squared(mesh, x, w):
    return summed((Shifted.apply(Doubled.apply(x)) * w).sum(-1), mesh["tp"])


def squared_reference(x, w):
    return ((4.0 * x * x + 1.0) * w).sum(-1)


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize(
    ("function", "reference", "wrong"),
    [(normalised, normalised_reference, Exponentials), (squared, squared_reference, Shifted)],
)
def test_the_function_with_the_wrong_backward_is_named(function, reference, wrong):
    wrong_scheme = declared(
        function, reference, {"x": "b v/tp", "w": "b v/tp"}, "b tp=I", mesh={"tp": (1, 2)},
        draw={name: values("normal") for name in ("x", "w")},
    )  # fmt: skip
    report = wrong_scheme.verify()
    line = inspect.getsourcelines(wrong.backward)[1] + 1  # below its decorator
    place = f"{wrong.__name__} at test_wrong_backwards.py:{line}"
    assert not report.ok
    assert report.notes["d/d x"] == (
        f"forward equal, gradient not: the backward of {place} is not the derivative of its forward",
    )


@pytest.mark.usefixtures("without_line_edits")
def test_a_function_is_named_beside_a_factor_without_a_meaning():
    wrong_scheme = declared(lambda mesh, x: Halved.apply(x), lambda x: x * x, mesh={"tp": (1, 2)})
    line = inspect.getsourcelines(Halved.backward)[1] + 1  # below its decorator
    first, second = wrong_scheme.verify().notes["d/d x"]
    place = f"Halved at test_wrong_backwards.py:{line}"
    assert first == f"forward equal, gradient not: the backward of {place} is not the derivative of its forward"
    assert second.startswith("off by the constant factor 0.5: a scale is missing or wrong")


@pytest.mark.usefixtures("without_line_edits")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_forward_that_exchanges_is_differentiated(is_async, monkeypatch):
    monkeypatch.setattr(Exchanged, "is_async", is_async)
    wrong_scheme = declared(
        lambda mesh, x: Exchanged.apply(x, mesh["tp"]), lambda x: x * x, {"x": "b/tp v"}, "b v/tp",
        mesh={"tp": (1, 2)}, draw={"x": values("normal")},
    )  # fmt: skip
    line = inspect.getsourcelines(Exchanged.backward)[1] + 1  # below its decorator
    place = f"Exchanged at test_wrong_backwards.py:{line}"
    assert wrong_scheme.verify().notes["d/d x"] == (
        f"forward equal, gradient not: the backward of {place} is not the derivative of its forward",
    )


@pytest.mark.usefixtures("without_line_edits")
def test_no_function_is_named_for_a_collective_beside_it():
    def cut(mesh, x):
        parts = [torch.empty_like(x) for _ in range(mesh.size("tp"))]
        dist.all_gather(parts, Doubled.apply(x).contiguous(), group=mesh["tp"])
        return torch.cat(parts, 0)

    wrong_scheme = declared(cut, lambda x: 2.0 * x, {"x": "b/tp"}, "b tp=R", mesh={"tp": (1, 2)})
    assert not any("is not the derivative" in note for note in wrong_scheme.verify().notes["d/d x"])


@pytest.mark.usefixtures("without_line_edits")
def test_no_function_is_named_for_a_mistake_beside_it():
    wrong_scheme = declared(
        lambda mesh, x: Doubled.apply(x).detach() * x, lambda x: 2.0 * x * x, {"x": "b/tp"}, "b/tp", mesh={"tp": (1, 2)}
    )
    assert not any("is not the derivative" in note for note in wrong_scheme.verify().notes["d/d x"])


class WithoutBias(torch.autograd.Function):
    """Its backward returns no gradient for `bias`."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent, None


@pytest.mark.usefixtures("without_line_edits")
def test_a_function_whose_backward_returns_none_is_named():
    wrong_scheme = declared(
        lambda mesh, x, bias: WithoutBias.apply(x, bias), lambda x, bias: x + bias, {"x": "b/tp d", "bias": "b/tp d"},
        "b/tp d", mesh={"tp": (1, 2)}, draw={name: values("normal") for name in ("x", "bias")},
    )  # fmt: skip
    line = inspect.getsourcelines(WithoutBias.backward)[1] + 1  # below its decorator
    place = f"WithoutBias at test_wrong_backwards.py:{line}"
    first, second = wrong_scheme.verify().notes["d/d bias"]
    assert first == f"forward equal, gradient not: the backward of {place} is not the derivative of its forward"
    assert second.startswith("no gradient was returned (None)")
