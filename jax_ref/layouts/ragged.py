"""Ragged: the positions in order, cut into blocks of any lengths, empty ones included."""

from collections.abc import Sequence

import numpy as np

from jax_ref.layouts.needs import check_cuttable


def ceil_lengths(size: int, world: int) -> list[int]:
    """DTensor's rule: blocks of ceil(size / world) until nothing is left.

    >>> ceil_lengths(4, 3)
    [2, 2, 0]
    """
    block = -(-size // world)
    lengths = []
    for _ in range(world):
        lengths.append(min(block, size - sum(lengths)))
    return lengths


def ragged(size: int, world: int, lengths: Sequence[int] | None = None) -> list[np.ndarray]:
    """Rank r holds the next `lengths[r]` positions; without lengths, DTensor's ceil rule.

    >>> ragged(7, 3)
    [array([0, 1, 2]), array([3, 4, 5]), array([6])]

    Errors: ValueError if the lengths are not one for each rank, one is negative, or they do
    not add up to size.
    """
    check_cuttable(size, world, "ragged")
    if lengths is None:
        lengths = ceil_lengths(size, world)
    shown = tuple(int(length) for length in lengths)
    if len(shown) != world:
        raise ValueError(f"ragged: lengths {shown} are {len(shown)}, world={world}; give one for each rank")
    if any(length < 0 for length in shown):
        raise ValueError(f"ragged: lengths {shown} have a negative one; lengths are 0 or more")
    if sum(shown) != size:
        raise ValueError(f"ragged: lengths {shown} add up to {sum(shown)}, size={size}; they must be equal")
    blocks, left = [], np.arange(size, dtype=np.int64)
    for length in shown:
        blocks.append(left[:length])
        left = left[length:]
    return blocks
