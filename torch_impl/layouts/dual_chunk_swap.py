"""DualChunkSwap: an early chunk and its mirror image from the end, as index arrays.

Under a causal mask the pair costs the same on every rank.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts.needs import check_cut


def positions(size: int, world: int, rank: int, *, device: torch.device | str | None = None) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: chunk `rank`, then chunk `2 * world - 1 - rank`, of 2 * world."""
    check_cut("dual_chunk_swap", size, world, rank)
    return _index(size, world, rank, device)


def dual_chunk_swap(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds.

    >>> dual_chunk_swap(8, 2)
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]

    Errors: ValueError unless size is a multiple of 2 * world; TypeError for what is no integer.
    """
    check_cut("dual_chunk_swap", size, world)
    return list(_index(size, world, torch.arange(world, device=device)[:, None], device).unbind())


def _index(size: int, world: int, rank: int | Tensor, device: torch.device | str | None) -> Tensor:
    """index[r, i] = i + c * r in the first chunk, i + c * (2 * (world - 1) - r) in the second; c a chunk."""
    chunk = size // (2 * world)
    i = torch.arange(2 * chunk, device=device)
    return i + chunk * torch.where(i < chunk, rank, 2 * (world - 1) - rank)
