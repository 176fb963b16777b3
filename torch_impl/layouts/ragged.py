"""Ragged: blocks in order, of any lengths, empty ones included, as index arrays."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts.needs import check_cut


def positions(
    size: int,
    world: int,
    rank: int,
    lengths: Sequence[int] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: from the sum of the lengths before it to the sum with its own."""
    check_cut("ragged", size, world, rank)
    bounds = _bounds(size, world, lengths)
    return torch.arange(bounds[rank], bounds[rank + 1], device=device)


def ragged(
    size: int, world: int, lengths: Sequence[int] | None = None, *, device: torch.device | str | None = None
) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds; without lengths, ceil(size / world) while it lasts, as DTensor.

    >>> ragged(4, 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([], dtype=torch.int64)]

    Errors: ValueError if the lengths are not one for each rank, one is negative, or they miss the size; TypeError for
            a size, world or lengths that are no integers.
    """
    check_cut("ragged", size, world)
    bounds = _bounds(size, world, lengths)
    return list(torch.arange(size, device=device).tensor_split(bounds[1:-1]))


def ceil_bound(size: int, world: int, rank: int) -> int:
    """Where a rank's block starts by DTensor's rule: blocks of ceil(size / world) while they last."""
    return min(rank * -(-size // world), size)


def _bounds(size: int, world: int, lengths: Sequence[int] | None) -> list[int]:
    """Where each block starts, and the end: world + 1 offsets."""
    if lengths is None:
        return [ceil_bound(size, world, rank) for rank in range(world + 1)]
    lengths = _checked_kinds(lengths)
    if len(lengths) != world:
        raise ValueError(f"ragged: lengths {lengths} are {len(lengths)}, world={world}; give one for each rank")
    if min(lengths) < 0:
        raise ValueError(f"ragged: lengths {lengths} have a negative one; lengths are 0 or more")
    bounds = list(accumulate(lengths, initial=0))
    if bounds[-1] != size:
        raise ValueError(f"ragged: lengths {lengths} add up to {bounds[-1]}, size={size}; they must be equal")
    return bounds


def _checked_kinds(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of any kind of integer, as ints; True and False are none."""
    try:
        given = tuple(lengths)
    except TypeError:
        raise TypeError(f"ragged: lengths={lengths!r} is no sequence; give one int for each rank") from None
    if not any(isinstance(length, bool) for length in given):
        with suppress(TypeError):
            return tuple(map(index, given))
    raise TypeError(f"ragged: lengths {given} are not all integers; pass ints")
