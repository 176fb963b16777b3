"""all_gather: every rank holds a piece; every rank gets the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_dim, checked_group, checked_type, joined_lengths
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
