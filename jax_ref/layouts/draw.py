"""A layout as one line of text: the owner of each position."""

from collections.abc import Callable, Sequence

import numpy as np

from jax_ref.layouts.partition import check_partition

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def draw(layout: Callable[[int, int], Sequence[np.ndarray]], size: int, world: int) -> str:
    """One digit for each position, the rank that holds it; letters from rank 10, `?` from rank 36.

    >>> from jax_ref.layouts.dual_chunk_swap import dual_chunk_swap
    >>> draw(dual_chunk_swap, 16, 4)
    '0011223333221100'
    """
    pieces = layout(size, world)
    check_partition(getattr(layout, "__name__", "given"), pieces, size)
    owner = {}
    for rank, positions in enumerate(pieces):
        for position in positions:
            owner[int(position)] = DIGITS[rank] if rank < len(DIGITS) else "?"
    return "".join(owner[position] for position in range(size))
