"""The way back from rank-major order to the order of positions."""

from collections.abc import Sequence

import numpy as np


def inverse(positions: Sequence[np.ndarray]) -> np.ndarray:
    """`inverse[p]` is the row of position p in the pieces of rank 0, rank 1, ... laid end to end.

    >>> inverse([np.array([0, 3]), np.array([1, 2])])
    array([0, 2, 3, 1])
    """
    return np.argsort(np.concatenate(positions), kind="stable")
