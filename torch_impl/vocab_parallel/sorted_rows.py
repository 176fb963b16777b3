"""Columns between two bounds as sorted rows, on a CPU: NumPy sorts by vector instructions, in 1/20 of torch's time.

A row in ascending order gives its 256 bins by a search for their bounds, and their weights as differences of one sum
that runs along the row. Nothing of the logits' size is stored: a block is sorted again in the next round, unless what
is left of it is short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel.filter_bounds import JOINED_ROWS
from torch_impl.vocab_parallel.radix_selection import BINS, float_of, order_keys
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

# Bytes of a block's rows that are stored, in all and as a share of the block's.
SHORT, SHARE = 512, 64
# A sorted copy of a block is as large as the block.
FINER = 2
MOST = 0.6  # of a row: to select more candidates takes longer than to sort all columns


class Ascending(NamedTuple):
    """Logits of some rows, each row ascending; what follows its `count` logits is +inf and none of them."""

    logits: Float[Tensor, "n c"]
    counts: Int[Tensor, "n 1"]

    def below(self, z: Float[Tensor, "n b"], *, or_equal: bool = False) -> Int[Tensor, "n b"]:
        """How many logits of each row are below z."""
        place = torch.searchsorted(self.logits, z.to(self.logits.dtype).contiguous(), right=or_equal)
        return torch.minimum(place, self.counts)


class SortedRows:
    """Columns of each row between two bounds that only become narrower; NaN is no candidate.

    Of each row only the `at_most` largest columns of this rank are candidates; None: all.
    """

    def __init__(self, logits: Float[Tensor, "*a v"], chunk_size: int | None, at_most: int | None = None) -> None:
        rows = max(1, rows_per_block(logits, chunk_size) // FINER)
        self.dtype, self._at_most = logits.dtype, logits.shape[-1] if at_most is None else at_most
        self._blocks = list(row_blocks(logits, rows))
        self._short: list[tuple[slice, Ascending]] = []

    def between(self, low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Iterator[tuple[slice, Ascending]]:
        """Some rows at a time: their slice, and at least their candidates with low <= z <= high."""
        long, short = [], []
        for row_slice, block in self._blocks:
            rows = self._sorted(block, low[row_slice, None], high[row_slice, None])
            start, end = rows.below(low[row_slice, None]), rows.below(high[row_slice, None], or_equal=True)
            counts = (end - start).clamp_min(0)
            width = int(counts.max()) if len(counts) else 0
            if width * len(counts) * rows.logits.itemsize > SHORT + block.nbytes // SHARE:
                long.append((row_slice, block))
                yield row_slice, rows
            else:
                short.append((row_slice, _columns(rows, start, counts, width)))
        self._blocks = long
        self._short += _joined(short)
        yield from self._short

    def _sorted(self, block: Float[Tensor, "n v"], low: Float[Tensor, "n 1"], high: Float[Tensor, "n 1"]) -> Ascending:
        """The candidates with low <= z <= high, and perhaps others."""
        count = min(self._at_most, block.shape[-1])
        if count == block.shape[-1] and (low == -math.inf).all():
            return _largest(block, count)
        is_candidate = block >= low
        if not (high == math.inf).all():
            is_candidate &= block <= high
        counts = is_candidate.sum(-1, keepdim=True)
        longest = int(counts.max()) if len(counts) else 0
        if longest > min(count, MOST * block.shape[-1]):
            return _largest(block, count)
        return Ascending(_selected(block, is_candidate, counts, longest), counts)


def _largest(block: Float[Tensor, "n v"], count: int) -> Ascending:
    """The `count` largest of each row."""
    largest = _largest_with_nan(block, count)
    if not largest[:, -1:].isnan().any():  # NumPy's sort puts NaN last
        return Ascending(largest, torch.full((len(block), 1), count))
    rows = _largest_with_nan(block, block.shape[-1])
    is_nan = rows.isnan()
    return Ascending(rows.masked_fill_(is_nan, math.inf), rows.shape[-1] - is_nan.sum(-1, keepdim=True))


def _selected(
    block: Float[Tensor, "n v"], is_selected: Bool[Tensor, "n v"], counts: Int[Tensor, "n 1"], longest: int
) -> Float[Tensor, "n c"]:
    """The selected logits of each row, ascending, then +inf."""
    rows = torch.full((len(block), longest), math.inf, dtype=accumulator(block.dtype))
    rows.masked_scatter_(torch.arange(longest) < counts, block.detach().masked_select(is_selected).to(rows.dtype))
    rows.numpy().sort(axis=-1)
    return rows


def _largest_with_nan(block: Float[Tensor, "n v"], count: int) -> Float[Tensor, "n count"]:
    """The largest of each row, ascending, NaN behind all others."""
    values = torch.empty(block.shape, dtype=accumulator(block.dtype)).copy_(block.detach())
    first = block.shape[-1] - count
    if first and count:
        values.numpy().partition(first, axis=-1)
    values = values[:, first:].contiguous()
    values.numpy().sort(axis=-1)
    return values


class SortedWeights:
    """Weights of sorted rows; `weigh` gives those of some rows' logits, None weighs each as 1."""

    def __init__(
        self, rows: SortedRows, weigh: Callable[[slice, Ascending], Float[Tensor, "n c"]] | None = None
    ) -> None:
        self.dtype, self._rows, self._weigh = rows.dtype, rows, weigh

    def bins(
        self, low: Float[Tensor, " n"], high: Float[Tensor, " n"], base: Int[Tensor, " n"], shift: int
    ) -> Float[Tensor, "n bins"]:
        bins, weigh = torch.zeros(len(base), BINS, dtype=accumulator(self.dtype)), self._weigh
        for row_slice, rows in self._rows.between(low, high):
            bounds = _bin_bounds(rows, base[row_slice], shift, self.dtype)
            bounds = torch.maximum(bounds, rows.below(low[row_slice, None]))
            if weigh is None:
                upto = bounds.double()
            else:  # float64: a bin is the difference of two sums of thousands of terms
                sums = weigh(row_slice, rows).double().cumsum(-1)
                upto = F.pad(sums, (1, 0)).gather(-1, bounds)
            bins[row_slice] += upto.diff(dim=-1).to(bins.dtype)
        return bins


def _bin_bounds(rows: Ascending, base: Int[Tensor, " n"], shift: int, dtype: torch.dtype) -> Int[Tensor, "n bounds"]:
    """Where each of the 256 bins of a row begins, and where the last one ends."""
    lowest, highest = order_keys(torch.tensor([-math.inf, math.inf], dtype=dtype)).tolist()
    first = (base.unsqueeze(-1) + torch.arange(BINS)) << shift
    # The key after the last bin's: 2^63 of float64 is no integer of 64 bits, and lies beyond infinity like NaN's.
    last = first[:, -1:] + ((1 << shift) - 1)
    keys = torch.cat([first, last.clamp(max=highest) + 1], dim=-1)
    bounds = rows.below(float_of(keys.clamp(lowest, highest), dtype))
    return torch.where(keys > highest, rows.counts, bounds)


def _columns(rows: Ascending, start: Int[Tensor, "n 1"], counts: Int[Tensor, "n 1"], width: int) -> Ascending:
    """The `counts` logits of each row from place `start` on, of which one row has `width`."""
    place = torch.arange(width)
    logits = rows.logits.gather(-1, (start + place).clamp(max=max(0, rows.logits.shape[-1] - 1)))
    return Ascending(torch.where(place < counts, logits, math.inf), counts)


def _joined(blocks: list[tuple[slice, Ascending]]) -> list[tuple[slice, Ascending]]:
    """Blocks in order of their rows, some together: each costs many small operations, however short it is."""
    groups: list[list[tuple[slice, Ascending]]] = []
    for row_slice, rows in blocks:
        follows = groups and groups[-1][-1][0].stop == row_slice.start
        if follows and row_slice.stop - groups[-1][0][0].start <= JOINED_ROWS:
            groups[-1].append((row_slice, rows))
        else:
            groups.append([(row_slice, rows)])
    joined = []
    for group in groups:
        width = max(rows.logits.shape[-1] for _, rows in group)
        logits = [F.pad(rows.logits, (0, width - rows.logits.shape[-1]), value=math.inf) for _, rows in group]
        rows = Ascending(torch.cat(logits), torch.cat([rows.counts for _, rows in group]))
        joined.append((slice(group[0][0].start, group[-1][0].stop), rows))
    return joined
