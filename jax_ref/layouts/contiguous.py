"""Contiguous: the positions in order, cut into equal blocks."""

import numpy as np

from jax_ref.layouts.needs import check_cuttable


def contiguous(size: int, world: int) -> list[np.ndarray]:
    """Rank r holds block r of `world` equal blocks.

    >>> contiguous(6, 3)
    [array([0, 1]), array([2, 3]), array([4, 5])]
    """
    check_cuttable(size, world, "contiguous")
    return list(np.arange(size, dtype=np.int64).reshape(world, size // world))
