"""The sum and the maximum over ranks, on each of them; and one rank's tensor on each of them."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_group, checked_rank, checked_type
from torch_impl.collectives.plain import summed, widened_copy


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


# broadcast: V -> R | I
def broadcast(
    x: Shaped[Tensor, "*a"], group: ProcessGroup, *, src: int, out: Literal["R", "I"]
) -> Shaped[Tensor, "*a"]:
    """The tensor of rank `src` of the group, on each of its ranks. The others' values are not read.

        x  "..." (own value on each rank)   ->   "... axis=R"  or  "... axis=I"

        Ax        Ay
        Ay   =>   Ay        for src=1
        Az        Ay

    On a single device: `return x[src]`, x being the ranks' tensors stacked.
    Backward: zero on every rank but src. On src, for `out="R"` the cotangents are addends and their sum is
    the gradient; for `out="I"` they are equal and any is.

    Cost:   forward 1 broadcast of x; backward 1 reduce to src ("R", summed in float32 or wider) or none
            ("I"). Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup; ValueError for another `out` or a src outside the
            group.
    """
    function = "collectives.broadcast"
    group, out = checked_group(function, "group", group), checked_type(function, out)
    return _Broadcast.apply(x, group, checked_rank(function, "src", src, group), out)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, src: int, out: str) -> Tensor:
        ctx.group, ctx.src, ctx.out = group, src, out
        whole = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(whole, group=group, group_src=src)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        gradient = widened_copy(cotangent)
        if ctx.out == "R":
            dist.reduce(gradient, op=dist.ReduceOp.SUM, group=ctx.group, group_dst=ctx.src)
        if ctx.group.rank() != ctx.src:
            gradient = torch.zeros_like(gradient)
        return gradient.to(cotangent.dtype), None, None, None
