"""Select columns on a CPU with NumPy: its comparisons, lists and partitions take 1/3 to 1/6 of torch's time.

Half-precision logits are compared in float32, which represents them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator

PARTS = 8  # a list of all columns takes several times the block's memory, so it is built in about this many parts


def columns_between(
    block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]
) -> Iterator[tuple[slice, Int[Tensor, " m"], Int[Tensor, " m"], Float[Tensor, " m"]]]:
    """(slice of rows, row, column and logit of each z with low <= z <= high), ordered by row, then column; never NaN.

    Few entries come as one part, many as several parts of consecutive rows. Rows count from the first row of the part.
    """
    logits = _array(block)
    is_inside = logits >= low.numpy()[:, None]
    if (high < math.inf).any():
        is_inside &= logits <= high.numpy()[:, None]
    for part in _parts(is_inside):
        place = np.flatnonzero(is_inside[part])
        first_of_row = np.arange(part.start, part.stop + 1) * logits.shape[-1]
        first_of_row -= first_of_row[0]
        per_row = np.diff(np.searchsorted(place, first_of_row))
        rows = np.repeat(np.arange(len(per_row), dtype=np.int32), per_row)
        first = np.repeat(first_of_row[:-1], per_row)
        columns, selected = (place - first).astype(np.int32), logits[part].reshape(-1).take(place)
        yield part, torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(selected).to(block.dtype)


def largest(block: Float[Tensor, "n v"], k: int, workspace: Float[Tensor, "#n v"]) -> Float[Tensor, "n k"]:
    """The k largest logits of each row, k <= v, the smallest of them first; NaN counts as -inf. A view of `workspace`.

    Allocating a copy of each block takes longer than partitioning it, so the caller passes a workspace of at least n
    rows, in the dtype of the comparisons.
    """
    copy, first = workspace[: len(block)].copy_(block.detach()), block.shape[-1] - k
    copy.numpy().partition(first, axis=-1)
    if copy[:, first:].isnan().any():  # the partition puts NaN last
        copy.copy_(block.detach()).nan_to_num_(-math.inf, math.inf, -math.inf)
        copy.numpy().partition(first, axis=-1)
    return copy[:, first:]


def _parts(is_inside: np.ndarray) -> list[slice]:
    """Slices of adjacent rows with about 1 / PARTS of the block's columns inside, or of one row with more."""
    most = is_inside.size // PARTS
    if np.count_nonzero(is_inside) <= most:  # counting per row takes nine times as long
        return [slice(0, len(is_inside))]
    number = np.count_nonzero(is_inside, axis=-1).cumsum() // max(most, 1)
    ends = [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(is_inside)]
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def _array(x: Float[Tensor, "n v"]) -> np.ndarray:
    """x as an array in float32 or wider; no copy if x has that dtype already."""
    return x.detach().to(accumulator(x.dtype)).numpy()
