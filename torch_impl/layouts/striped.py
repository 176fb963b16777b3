"""Striped: positions dealt out in turn, as index arrays."""

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts.needs import check_cut


def positions(size: int, world: int, rank: int, *, device: torch.device | str | None = None) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: index[r, i] = i * world + r."""
    check_cut("striped", size, world, rank)
    return torch.arange(rank, size, world, device=device) if size else torch.arange(0, device=device)


def striped(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds.

    >>> striped(6, 3)
    [tensor([0, 3]), tensor([1, 4]), tensor([2, 5])]

    Errors: ValueError unless size is a multiple of world; TypeError for what is no integer.
    Source: arXiv 2311.09431 (striped attention).
    """
    check_cut("striped", size, world)
    rank = torch.arange(world, device=device)[:, None]
    return list((rank + world * torch.arange(size // world, device=device)).unbind())
