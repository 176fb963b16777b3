"""Contiguous: equal blocks in order, as index arrays."""

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts.needs import check_cut


def positions(size: int, world: int, rank: int, *, device: torch.device | str | None = None) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: index[r, i] = r * (size / world) + i."""
    check_cut("contiguous", size, world, rank)
    local = size // world
    return torch.arange(rank * local, (rank + 1) * local, device=device)


def contiguous(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds.

    >>> contiguous(6, 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([4, 5])]

    Errors: ValueError unless size is a multiple of world; TypeError for what is no integer.
    """
    check_cut("contiguous", size, world)
    return list(torch.arange(size, device=device).view(world, size // world).unbind())
