"""Selection among the columns of a CPU by NumPy: its comparisons, lists and partitions take 1/3 to 1/6 of torch's time.

Half-precision logits are compared in float32, which has all their values.
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

PARTS = 8  # of a list of all columns of a block, which takes several times the block's memory


def columns_between(
    block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]
) -> Iterator[tuple[slice, Int[Tensor, " m"], Int[Tensor, " m"], Float[Tensor, " m"]]]:
    """Row, column and logit of each low <= z <= high, by row and then by column; NaN is not among them.

    Of all rows together where these are few, else of some rows at a time, from the first of which they are counted.
    """
    logits = _array(block)
    is_inside = logits >= low.numpy()[:, None]
    if (high < math.inf).any():
        is_inside &= logits <= high.numpy()[:, None]
    counts = np.count_nonzero(is_inside, axis=-1)
    for part in _parts(counts, logits.size // PARTS):
        place, per_row = np.flatnonzero(is_inside[part]), counts[part]
        rows = np.repeat(np.arange(len(per_row), dtype=np.int32), per_row)
        first = np.repeat(np.arange(len(per_row)) * logits.shape[-1], per_row)
        columns, selected = (place - first).astype(np.int32), logits[part].reshape(-1).take(place)
        yield part, torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(selected).to(block.dtype)


def largest(block: Float[Tensor, "n v"], k: int, workspace: Float[Tensor, "#n v"]) -> Float[Tensor, "n k"]:
    """The k largest of each row, k <= v, in any order; NaN counts as -inf. A view of `workspace`.

    To allocate a copy of each block takes longer than to partition it, hence the workspace: n rows or more, in the
    dtype of the comparisons.
    """
    copy, first = workspace[: len(block)].copy_(block.detach()), block.shape[-1] - k
    copy.numpy().partition(first, axis=-1)
    if copy[:, first:].isnan().any():  # the partition puts NaN last
        copy.copy_(block.detach()).nan_to_num_(-math.inf, math.inf, -math.inf)
        copy.numpy().partition(first, axis=-1)
    return copy[:, first:]


def _parts(counts: np.ndarray, most: int) -> list[slice]:
    """Rows in a row that have about `most` columns together, or one row of more."""
    if counts.sum() <= most:
        return [slice(0, len(counts))]
    number = counts.cumsum() // max(most, 1)
    ends = [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(counts)]
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def _array(x: Float[Tensor, "n v"]) -> np.ndarray:
    """In float32 or wider, without a copy if it is so already."""
    return x.detach().to(accumulator(x.dtype)).numpy()
