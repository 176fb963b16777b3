"""all_reduce: every rank holds an addend; every rank gets the sum. And the maximum, which has no gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_group, checked_type
from torch_impl.collectives.plain import summed


# all_reduce: P -> R | I
def all_reduce(x: Shaped[Tensor, "*a"], group: ProcessGroup, out: Literal["R", "I"] = "I") -> Shaped[Tensor, "*a"]:
    """Sum over the ranks of a group, on each of them.

        x  "... axis=P"   ->   "... axis=R"  or  "... axis=I"

        +Ax        Ax + Ay + Az
        +Ay   =>   Ax + Ay + Az
        +Az        Ax + Ay + Az

    On a single device: `return x  # Identity!`
    Backward: for `out="I"` every rank has the same cotangent, which is the gradient. For `out="R"` the
    cotangents are addends, and their sum is the gradient.

    Cost:   forward 1 all_reduce of x; backward none for "I", 1 all_reduce for "R". bfloat16 and float16
            travel and are summed as float32. Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup; ValueError for another `out`.
    Source: the types are those of meta-pytorch/spmd_types.
    """
    group = checked_group("collectives.all_reduce", "group", group)
    return _AllReduce.apply(x, group, checked_type("collectives.all_reduce", out))


# all_reduce_max: V -> I, no gradient
def all_reduce_max(x: Float[Tensor, "*a"], group: ProcessGroup) -> Float[Tensor, "*a"]:
    """Element-wise maximum over the ranks of a group, on each of them; not differentiable.

        x  "..." (own value on each rank)   ->   "..." (no gradient)

        Ax        max(Ax, Ay, Az)
        Ay   =>   max(Ax, Ay, Az)
        Az        max(Ax, Ay, Az)

    The result never requires grad: it is meant as a shift that cancels, as in a stable softmax.

    Cost:   forward 1 all_reduce of x, in its own dtype. Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup.
    """
    group = checked_group("collectives.all_reduce_max", "group", group)
    largest = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, out: str) -> Tensor:
        ctx.group, ctx.out = group, out
        return summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        gradient = summed(cotangent, ctx.group) if ctx.out == "R" else cotangent
        return gradient, None, None
