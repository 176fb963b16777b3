"""Functions under a checkpoint that runs a backward of its own, which rejects `torch.autograd.grad`."""

import jax
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardproof import scheme, values
from torch_impl.collectives import all_reduce, reinterpret


class CheckpointFunction(torch.autograd.Function):
    """A checkpoint as libraries write them: the forward without a graph, a backward within the backward."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function = function
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx, gradient):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad(), please use .backward() if possible")
        args = [arg.detach().requires_grad_(arg.requires_grad) for arg in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.function(*args)
        torch.autograd.backward(result, gradient)
        return None, *(arg.grad for arg in args)


def of_torch(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("wrapped", [of_torch, CheckpointFunction.apply])
@pytest.mark.parametrize("sums_gradients", [True, False])
def test_a_reentrant_checkpoint_is_judged_by_its_gradients(wrapped, sums_gradients):
    @scheme(
        reference=lambda x, w1, w2: jax.nn.silu(x @ w1) @ w2,
        mesh={"tp": (1, 2)},
        inputs={"x": "s d tp=I", "w1": "d f/tp", "w2": "f/tp d"},
        outputs="s d tp=I",
        draw={name: values("normal") for name in ("x", "w1", "w2")},
        dtypes=("float32",),
        roundings=2,
        excluded_conditions=("autocast", "inference_mode", "overwritten"),
    )
    def checkpointed(mesh, x, w1, w2):
        def block(x, w1, w2):
            x = reinterpret(x, mesh["tp"], src="I", dst="R") if sums_gradients else x
            return all_reduce(torch.nn.functional.silu(x @ w1) @ w2, mesh["tp"])

        return wrapped(block, x, w1, w2)

    report = checkpointed.verify(examples=12)
    assert report.verdict == ("equal" if sums_gradients else "mismatch"), str(report)
    assert sums_gradients or "gradient missing a sum over tp" in str(report)
