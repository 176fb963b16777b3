"""Sum over ranks, maximum over ranks, and broadcast of one rank's tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import all_reduce_sum, wide_copy
from torch_impl.contract import GradientType, Group, Rejected, ShardedAny, ShardedNumber, contract, dtype_name


# all_reduce: P -> R | I
@contract
def all_reduce(
    x: ShardedNumber[Tensor, "... axis=P"], group: Group[ProcessGroup, "axis"], out: GradientType = "I"
) -> ShardedNumber[Tensor, "... axis=R"] | ShardedNumber[Tensor, "... axis=I"]:
    """Sum over the ranks of a group, on every rank.

        +Ax        Ax + Ay + Az
        +Ay   =>   Ax + Ay + Az
        +Az        Ax + Ay + Az

    On a single device: `return x`, the identity.
    `out` is the gradient type of the result. Backward: for "I" all ranks have equal cotangents, and the
    gradient is that cotangent. For "R" the gradient is the sum of the ranks' cotangents.

    Cost:   forward 1 all_reduce of x; backward none for "I", 1 all_reduce for "R". bfloat16 and float16
            are sent and summed as float32. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for an unknown `out`.
    Source: the gradient types follow meta-pytorch/spmd_types.
    """
    return _AllReduce.apply(x, group, out)


# all_reduce_max: V -> I, no gradient
@contract
def all_reduce_max(
    x: ShardedNumber[Tensor, "..."], group: Group[ProcessGroup, "axis"]
) -> ShardedNumber[Tensor, "... axis=I"]:
    """Element-wise maximum over the ranks of a group, on every rank; not differentiable.

        Ax        max(Ax, Ay, Az)
        Ay   =>   max(Ax, Ay, Az)
        Az        max(Ax, Ay, Az)

    The result never requires grad. Use it as a shift that cancels, for example in a stable softmax. Backends compare
    with <, so a NaN on one rank may be lost; torch.maximum keeps it.

    Cost:   forward 1 all_reduce of x, in its dtype. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup.
    """
    if x.is_complex():
        raise Rejected(f"x is {dtype_name(x)}, which has no order; pass x.abs()", TypeError)
    # In x's dtype: a maximum is one of the values, so no rounding occurs.
    largest = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


# broadcast: V -> R | I
@contract
def broadcast(
    x: ShardedAny[Tensor, "..."], group: Group[ProcessGroup, "axis"], *, src: int, out: GradientType
) -> ShardedAny[Tensor, "... axis=R"] | ShardedAny[Tensor, "... axis=I"]:
    """Send the tensor of the group's rank `src` to every rank. The values of the other ranks are not read.

        Ax        Ay
        Ay   =>   Ay        for src=1
        Az        Ay

    On a single device: `return x[src]`, where x is the stack of the ranks' tensors.
    `out` is the gradient type of the result. Backward: the gradient is zero on every rank but src. For "R"
    the gradient on src is the sum of the ranks' cotangents; for "I" the cotangents are equal, and it is src's own.

    Cost:   forward 1 broadcast of x; backward 1 reduce to src ("R", summed in float32 or wider) or none
            ("I"). Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for an unknown `out` or a src outside the group.
    """
    if not 0 <= src < group.size():
        raise Rejected(f"src={src} is outside a group of {group.size()} ranks")
    return _Broadcast.apply(x, group, src, out)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, out: str) -> Tensor:
        ctx.group, ctx.out = group, out
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        if ctx.out == "R":
            return _AllReduce.apply(cotangent, ctx.group, "R"), None, None
        return as_replicated(cotangent, ctx.group), None, None


# Gradient types: I -> R.
def as_replicated(x: Tensor, group: ProcessGroup) -> Tensor:
    """x with gradient type R: backward sums the ranks' cotangents. Returns x itself if x does not require grad.

    No collective forward; 1 all_reduce backward.
    """
    return _Replicated.apply(x, group) if x.requires_grad else x


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(cotangent, ctx.group, "I"), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, src: int, out: str) -> Tensor:
        ctx.group, ctx.src, ctx.out = group, src, out
        # A copy: broadcast overwrites the tensor of every rank but src.
        result = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(result, group=group, group_src=src)
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _ToSource.apply(cotangent, ctx.group, ctx.src, ctx.out), None, None, None


class _ToSource(torch.autograd.Function):
    """The transpose of a broadcast. Rank src gets the sum of the cotangents ("R") or its own ("I"), others zeros."""

    @staticmethod
    def forward(ctx: Any, cotangent: Tensor, group: ProcessGroup, src: int, out: str) -> Tensor:
        ctx.group, ctx.src, ctx.out = group, src, out
        gradient = wide_copy(cotangent)
        if out == "R":
            dist.reduce(gradient, op=dist.ReduceOp.SUM, group=group, group_dst=src)
        # dist.reduce leaves unspecified values in the buffers of all ranks but src.
        if group.rank() != src:
            gradient = torch.zeros_like(gradient)
        return gradient.to(cotangent.dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _Broadcast.apply(cotangent, ctx.group, ctx.src, ctx.out), None, None, None
