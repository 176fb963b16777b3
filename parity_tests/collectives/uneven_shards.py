"""Shards of unequal length, for the ranks too, which load no JAX."""

import numpy as np


def uneven_lengths(size: int, world: int) -> list[int]:
    """Shards of unequal length, an empty one among them from three ranks on."""
    borders = np.minimum(np.cumsum([0, *((3 * rank + 2) % 5 for rank in range(world))]), size)
    borders[-1] = size
    return np.diff(borders).tolist()


def uneven(size: int, world: int) -> list[np.ndarray]:
    """The layout of `uneven_lengths`."""
    return np.split(np.arange(size), np.cumsum(uneven_lengths(size, world))[:-1])
