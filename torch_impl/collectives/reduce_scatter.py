"""reduce_scatter: every rank holds an addend of the whole; every rank gets its piece of the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_dim, checked_group, cut_lengths
from torch_impl.collectives.plain import gathered, scattered_sum


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
