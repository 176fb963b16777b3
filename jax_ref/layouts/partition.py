"""The promise every layout makes: each position is held by exactly one rank."""

from collections.abc import Sequence

import numpy as np

SHOWN = 8  # positions listed in a message before it says how many more there are


def check_partition(name: str, positions: Sequence[np.ndarray], size: int) -> None:
    """Raise ValueError unless `positions`, one array for each rank, hold each of `range(size)` once.

    >>> check_partition("mine", [np.array([0, 1, 1, 3]), np.array([4, 5, 6, 7])], 8)
    Traceback (most recent call last):
    ValueError: layout 'mine' is not a partition of 8 positions over 2 ranks: missing [2], repeated [1]
    """
    for rank, held in enumerate(positions):
        array = np.asarray(held)
        if array.ndim != 1:
            raise ValueError(
                f"layout {name!r} gives rank {rank} an array of shape {array.shape}; positions are one row"
            )
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"layout {name!r} gives rank {rank} dtype {array.dtype}; positions are integers")
    everything = np.concatenate([np.zeros(0, np.int64), *(np.asarray(held).astype(np.int64) for held in positions)])
    inside = (everything >= 0) & (everything < size)
    count = np.bincount(everything[inside], minlength=size)
    wrong = {
        "missing": np.flatnonzero(count == 0),
        "repeated": np.flatnonzero(count > 1),
        "outside": np.unique(everything[~inside]),
    }
    found = ", ".join(f"{what} {_listed(where)}" for what, where in wrong.items() if len(where))
    if found:
        ranks = f"{len(positions)} rank{'' if len(positions) == 1 else 's'}"
        raise ValueError(f"layout {name!r} is not a partition of {size} positions over {ranks}: {found}")


def _listed(where: np.ndarray) -> str:
    more = len(where) - SHOWN
    return str(where[:SHOWN].tolist()) + (f" and {more} more" if more > 0 else "")
