"""all_gather and reduce_scatter, each the other's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_dim, checked_group, checked_type, cut_lengths, joined_lengths
from torch_impl.collectives.plain import gathered, scattered_sum


# all_gather: V -> R | I
def all_gather(
    x: Shaped[Tensor, "*a"],
    group: ProcessGroup,
    *,
    out: Literal["R", "I"],
    dim: int = 0,
    lengths: Sequence[int] | None = None,
) -> Shaped[Tensor, "*b"]:
    """The pieces of all ranks, joined along `dim` in rank order.

        x  "a/axis ..."   ->   "a ... axis=R"  or  "a ... axis=I"

        A0            [A0, A1, A2]
           A1     =>  [A0, A1, A2]
              A2      [A0, A1, A2]

    On a single device: `return x  # Identity!`
    `lengths` gives each rank's positions along `dim`, zero allowed; without it all ranks hold as many.
    Backward: for `out="R"` the cotangents are addends: this rank's piece of their sum. For `out="I"` they are
    equal: this rank's piece.

    Cost:   forward 1 all_gather of the longest piece; backward 1 reduce_scatter of world * longest ("R",
            summed in float32 or wider) or none ("I"). Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup; ValueError for another `out`, a dim that x lacks,
            or lengths that do not fit the group or x.
    """
    function = "collectives.all_gather"
    group, out = checked_group(function, "group", group), checked_type(function, out)
    dim = checked_dim(function, "dim", dim, x)
    return _AllGather.apply(x, group, out, dim, joined_lengths(function, "lengths", lengths, x.shape[dim], dim, group))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, out: str, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.out, ctx.dim, ctx.lengths = group, out, dim, lengths
        return gathered(x, group, dim, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.out == "R":
            gradient = scattered_sum(cotangent, ctx.group, ctx.dim, ctx.lengths)
        else:
            rank = ctx.group.rank()
            own = cotangent.narrow(ctx.dim, sum(ctx.lengths[:rank]), ctx.lengths[rank])
            gradient = own.clone(memory_format=torch.contiguous_format)  # a view would let x.grad alias the cotangent
        return gradient, None, None, None, None


# reduce_scatter: P -> V
def reduce_scatter(
    x: Shaped[Tensor, "*a"], group: ProcessGroup, *, dim: int = 0, lengths: Sequence[int] | None = None
) -> Shaped[Tensor, "*b"]:
    """Sum over the ranks of a group, cut along `dim` in rank order.

        x  "a ... axis=P"   ->   "a/axis ..."

        +[A0, A1, A2]        A0 + B0 + C0
        +[B0, B1, B2]   =>                  A1 + B1 + C1
        +[C0, C1, C2]                                      A2 + B2 + C2

    On a single device: `return x  # Identity!`
    `lengths` gives the positions along `dim` that each rank gets, zero allowed; without it equal ones.
    Backward: the cotangent's pieces, joined, are the gradient on each rank.

    Cost:   forward 1 reduce_scatter of world * longest, bfloat16 and float16 as float32; backward 1
            all_gather of the longest piece. Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup; ValueError for a dim that x lacks, for lengths that
            do not fit the group or x, or without lengths for a size that the ranks cannot share equally.
    """
    function = "collectives.reduce_scatter"
    group = checked_group(function, "group", group)
    dim = checked_dim(function, "dim", dim, x)
    return _ReduceScatter.apply(x, group, dim, cut_lengths(function, "lengths", lengths, x.shape[dim], dim, group))


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.lengths = group, dim, lengths
        return scattered_sum(x, group, dim, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return gathered(cotangent, ctx.group, ctx.dim, ctx.lengths), None, None, None
