"""Striped: the positions dealt out one by one, as cards are."""

import numpy as np

from jax_ref.layouts.needs import check_cuttable


def striped(size: int, world: int) -> list[np.ndarray]:
    """Rank r holds positions r, r + world, r + 2 * world, ...

    >>> striped(6, 3)
    [array([0, 3]), array([1, 4]), array([2, 5])]

    Source: arXiv 2311.09431 (striped attention).
    """
    check_cuttable(size, world, "striped")
    return list(np.ascontiguousarray(np.arange(size, dtype=np.int64).reshape(size // world, world).T))
