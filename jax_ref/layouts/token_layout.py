"""What stands at each position of a packed stream, sequence by sequence.

Sequence j is `cu_padded[j]:cu_padded[j + 1]`; its first `cu_real[j + 1] - cu_real[j]` tokens are real.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Offsets = Sequence[int] | np.ndarray


def sequence_ids(cu_padded: Offsets) -> np.ndarray:
    """j, as often as sequence j is long.

    >>> sequence_ids([0, 2, 2, 5])
    array([0, 0, 2, 2, 2])
    """
    return _joined([np.full(stop - start, j) for j, (start, stop) in enumerate(pairwise(cu_padded))])


def position_ids(cu_padded: Offsets) -> np.ndarray:
    """0, 1, 2, ... in each sequence, and on through its padding.

    >>> position_ids([0, 2, 2, 5])
    array([0, 1, 0, 1, 2])
    """
    return _joined([np.arange(stop - start) for start, stop in pairwise(cu_padded)])


def padding_mask(cu_padded: Offsets, cu_real: Offsets) -> np.ndarray:
    """False for the real tokens of each sequence, then True to its end.

    >>> padding_mask([0, 2, 5], [0, 2, 3])
    array([False, False, False,  True,  True])
    """
    masks = [np.zeros(0, bool)]
    for (start, stop), (first, end) in zip(pairwise(cu_padded), pairwise(cu_real), strict=True):
        real = end - first
        masks.append(np.array([False] * real + [True] * (stop - start - real), bool))
    return np.concatenate(masks)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *pieces]).astype(np.int64)
