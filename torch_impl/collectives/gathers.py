"""all_gather and reduce_scatter, with each other as backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives.lengths import dim_from_front, lengths_to_gather, lengths_to_scatter
from torch_impl.collectives.plain import all_gather_concat, reduce_scatter_sum
from torch_impl.contract import GradientType, Group, ShardedAny, ShardedNumber, contract


# all_gather: V -> R | I
@contract
def all_gather(
    x: ShardedAny[Tensor, "... a/axis ..."],
    group: Group[ProcessGroup, "axis"],
    *,
    out: GradientType,
    dim: int = 0,
    lengths: Sequence[int] | None = None,
) -> ShardedAny[Tensor, "... a ... axis=R"] | ShardedAny[Tensor, "... a ... axis=I"]:
    """The shards of all ranks, concatenated along `dim` in rank order.

        A0            [A0, A1, A2]
           A1     =>  [A0, A1, A2]
              A2      [A0, A1, A2]

    On a single device: `return x`, the identity.
    `lengths` has the number of positions along `dim` on each rank, 0 included; without it all shards are as long as x.
    `out` is the gradient type of the result. Backward: for "R" the cotangents are addends, and the gradient is this
    rank's shard of their sum. For "I" the cotangents are equal, and the gradient is this rank's shard.

    Cost:   forward 1 all_gather of the longest shard; backward 1 reduce_scatter of world * longest ("R",
            summed in float32 or wider) or none ("I"). Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for an unknown `out`, a dim that x lacks,
            or lengths that do not fit the group or x.
    """
    dim = dim_from_front("dim", dim, x)
    lengths = lengths_to_gather("lengths", lengths, x, dim, group)
    return AllGather.apply(x, group, out, dim, lengths)


# reduce_scatter: P -> V
@contract
def reduce_scatter(
    x: ShardedNumber[Tensor, "... a ... axis=P"],
    group: Group[ProcessGroup, "axis"],
    *,
    dim: int = 0,
    lengths: Sequence[int] | None = None,
) -> ShardedNumber[Tensor, "... a/axis ..."]:
    """Sum over the ranks of a group; rank r gets shard r of the sum along `dim`.

        +[A0, A1, A2]        A0 + B0 + C0
        +[B0, B1, B2]   =>                  A1 + B1 + C1
        +[C0, C1, C2]                                      A2 + B2 + C2

    On a single device: `return x`, the identity.
    `lengths` has the number of positions along `dim` for each rank, 0 included; without it all shards are equal.
    Backward: on every rank, the gradient is the concatenation of the cotangent's shards.

    Cost:   forward 1 reduce_scatter of world * longest, bfloat16 and float16 as float32; backward 1
            all_gather of the longest shard. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for a dim that x lacks, for lengths that do not fit the
            group or x, or without lengths for a size that the group's size does not divide.
    """
    dim = dim_from_front("dim", dim, x)
    lengths = lengths_to_scatter("lengths", lengths, x, dim, group)
    return ReduceScatter.apply(x, group, dim, lengths)


# The cores of the public functions, for code whose contract has checked the lengths.


# Gradient types: V -> R | I.
def gather_rows(x: Tensor, group: ProcessGroup, lengths: list[int], out: str) -> Tensor:
    """`all_gather` of the ranks' rows; rank r has lengths[r] rows."""
    return AllGather.apply(x, group, out, 0, lengths)


# Gradient types: P -> V.
def reduce_scatter_rows(x: Tensor, group: ProcessGroup, lengths: list[int]) -> Tensor:
    """`reduce_scatter` of rows; rank r receives lengths[r] rows."""
    return ReduceScatter.apply(x, group, 0, lengths)


# Gradient types: I -> V.
def own_shard(x: Tensor, group: ProcessGroup, lengths: list[int], dim: int = 0) -> Tensor:
    """This rank's shard of an invariant tensor. No collective; backward 1 all_gather of the longest shard."""
    return _Shard.apply(x, group, dim, lengths)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, out: str, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.out, ctx.dim, ctx.lengths = group, out, dim, lengths
        return all_gather_concat(x, group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        # "R": the full gradient is the sum of the ranks' cotangents, and this rank needs its shard of it.
        # "I": every rank has the full gradient already, and nothing is sent.
        shard_of = ReduceScatter if ctx.out == "R" else _Shard
        return shard_of.apply(cotangent, ctx.group, ctx.dim, ctx.lengths), None, None, None, None


class _Shard(torch.autograd.Function):
    """This rank's shard of a replicated tensor, `axis=I`: the transpose of an all_gather to "I"."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.lengths = group, dim, lengths
        rank = group.rank()
        shard = x.narrow(dim, sum(lengths[:rank]), lengths[rank])
        return shard.clone(memory_format=torch.contiguous_format)  # as a view, the gradient would alias the cotangent

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return AllGather.apply(cotangent, ctx.group, "I", ctx.dim, ctx.lengths), None, None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, lengths: list[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.lengths = group, dim, lengths
        return reduce_scatter_sum(x, group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        # x is one addend of the sum, so its gradient is the full cotangent of the sum.
        return AllGather.apply(cotangent, ctx.group, "R", ctx.dim, ctx.lengths), None, None, None
