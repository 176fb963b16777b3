"""broadcast: every rank gets what one rank holds."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.arguments import checked_group, checked_rank, checked_type
from torch_impl.collectives.plain import widened_copy


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
