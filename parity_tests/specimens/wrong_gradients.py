"""Autograd functions around one collective each, right and wrong, and a scheme with two of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof import scheme, values
from shardproof.declaration import Scheme


def summed(x: Tensor, group: Any) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


class CopyToRanks(torch.autograd.Function):
    """Identity; the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return summed(gradient, ctx.group), None


class SumOfRanks(torch.autograd.Function):
    """The sum of the ranks' terms; each term has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class GatherWithoutSum(torch.autograd.Function):
    """All rows on each rank; its backward takes the rank's own rows and forgets the other ranks' cotangents of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.rows = dist.get_rank(group), x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows].clone(), None


def two_products(mesh: Any, x: Tensor, w: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Sums of x w, whose w has a sum too many in its backward, and of y g, which is right and runs backward first."""
    first = SumOfRanks.apply((x * CopyToRanks.apply(w, mesh["tp"])).sum(0), mesh["tp"])
    second = SumOfRanks.apply((y * CopyToRanks.apply(g, mesh["tp"])).sum(0), mesh["tp"])
    return first + second  # pyright: ignore[reportOperatorIssue]


def two_products_scheme() -> Scheme:
    return scheme(
        reference=lambda x, w, y, g: (x * w[None]).sum(0) + (y * g[None]).sum(0),
        mesh={"tp": (2, 3)},
        inputs={"x": "b/tp d", "w": "d tp=R", "y": "b/tp d", "g": "d tp=I"},
        outputs="d tp=I",
        draw={name: values("normal") for name in "xwyg"},
        dtypes=("float32",),
    )(two_products)


def line_of(function: Any, text: str) -> str:
    """`file:line` of the only line of a function's source that contains a text."""
    import inspect

    lines, start = inspect.getsourcelines(function)
    (number,) = [start + index for index, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}".rpartition("/")[2] + f":{number}"
