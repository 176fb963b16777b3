"""Shards of unequal length. Ranks import this, so it loads no JAX."""

import numpy as np


def uneven_lengths(size: int, world: int) -> list[int]:
    """Lengths that differ between ranks; from three ranks on, one of them is 0."""
    borders = np.minimum(np.cumsum([0, *((3 * rank + 2) % 5 for rank in range(world))]), size)
    borders[-1] = size
    return np.diff(borders).tolist()


def uneven(size: int, world: int) -> list[np.ndarray]:
    """The layout of `uneven_lengths`."""
    return np.split(np.arange(size), np.cumsum(uneven_lengths(size, world))[:-1])
