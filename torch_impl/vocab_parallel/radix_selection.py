"""Radix selection over all ranks: the logit at which a given weight is used up, in descending order.

Bit patterns of floats have the order of the floats once negative patterns are mirrored. In rounds of eight bits, every
rank adds up the weight of its candidates in 256 bins, the bins are summed over the ranks, and each row continues in the
bin where its weight runs out. No logit leaves its rank, and the selection is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import numpy_selection
from torch_impl.vocab_parallel.filter_bounds import Candidates, Entries, of_rows
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

BITS = 8
BINS = 1 << BITS
ALL_BINS = BINS + 2  # the first and the last bin take logits with other leading digits
ROWS = 256  # rows of bins that are accumulated at a time
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@runtime_checkable
class Weights(Protocol):
    """The weights of this rank's columns."""

    dtype: torch.dtype  # the logits'

    def bins(
        self, low: Float[Tensor, " n"], high: Float[Tensor, " n"], base: Int[Tensor, " n"], shift: int
    ) -> Float[Tensor, "n bins"]:
        """The weight of the columns with low <= z <= high and the row's leading digits, binned by their next digit."""
        ...


def order_keys(z: Float[Tensor, "*a"]) -> Int[Tensor, "*a"]:
    """Integers in the order of the floats; equal floats have equal integers, including 0.0 and -0.0."""
    return _mirror((z + 0.0).view(INTEGER[z.itemsize]), z.itemsize).long()  # -0.0 + 0.0 is 0.0


def float_of(keys: Int[Tensor, "*a"], dtype: torch.dtype) -> Float[Tensor, "*a"]:
    """The floats for these integers: the inverse of `order_keys`."""
    return _mirror(keys, dtype.itemsize).to(INTEGER[dtype.itemsize]).view(dtype)


def last_kept(
    weights: Weights, low: Float[Tensor, " n"], room: Float[Tensor, " n"], group: ProcessGroup | None
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(z, weight above z): the smallest z >= low that has positive weight and less than `room` weight above it.

    One all_reduce of 256 sums per row for each byte of the logits' dtype; none if one rank has full rows.
    """
    dtype = weights.dtype
    above = torch.zeros_like(room)
    prefix = torch.zeros(room.shape, dtype=torch.int64, device=room.device)
    lowest, highest, has_room = low, torch.full_like(low, math.inf), room > 0
    # Each pass fixes the next eight bits of every row's result, starting with the sign.
    for shift in reversed(range(0, BITS * dtype.itemsize, BITS)):
        is_first = shift + BITS == BITS * dtype.itemsize
        base = prefix - BINS // 2 if is_first else prefix << BITS  # the first digit includes the sign
        bins = weights.bins(lowest, highest, base, shift)
        if group is not None:
            dist.all_reduce(bins, group=group)
        digit, above = _lowest_with_room(bins, above, room)
        prefix = base + digit
        lowest, highest = _bounds(prefix, shift, dtype, low)
        # A row without room has no such logit, and its digits are meaningless: it keeps its initial bounds.
        lowest, highest = torch.where(has_room, lowest, low), torch.where(has_room, highest, math.inf)
    return float_of(prefix, dtype).to(above.dtype), above


def _lowest_with_room(
    bins: Float[Tensor, "n bins"], above: Float[Tensor, " n"], room: Float[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """(bin, weight above it): the lowest bin that has positive weight and less than `room` weight above it."""
    lowest, weight = torch.empty(len(above), dtype=torch.int64, device=above.device), torch.empty_like(above)
    for row_slice, rows in row_blocks(bins, ROWS):
        before = above[row_slice].unsqueeze(-1) + _above_each(rows)
        goes_on = (rows > 0) & (before < room[row_slice].unsqueeze(-1))
        digit = goes_on.to(torch.uint8).argmax(-1, keepdim=True)  # argmax returns the first True: the lowest bin
        lowest[row_slice], weight[row_slice] = digit.squeeze(-1), before.gather(-1, digit).squeeze(-1)
    return lowest, weight


def _above_each(bins: Float[Tensor, "n bins"]) -> Float[Tensor, "n bins"]:
    """For each bin, the weight in all higher bins."""
    upto = bins.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(upto[:, 1:], (0, 1))


def _bounds(
    prefix: Int[Tensor, " n"], shift: int, dtype: torch.dtype, low: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(smallest, largest) float with these leading digits; bit patterns beyond infinity count as infinity."""
    smallest = float_of(prefix << shift, dtype).to(low.dtype)
    largest = float_of(((prefix + 1) << shift) - 1, dtype).to(low.dtype)
    return torch.where(smallest > low, smallest, low), torch.where(largest.isnan(), math.inf, largest)


def _mirror(bits: Int[Tensor, "*a"], itemsize: int) -> Int[Tensor, "*a"]:
    width = 8 * itemsize
    return bits ^ ((bits >> (width - 1)) & ((1 << (width - 1)) - 1))  # if negative, flip all bits except the sign


class ListedWeights:
    """The weights of listed columns; `weigh` returns the weights of some rows' entries."""

    def __init__(self, candidates: Candidates, weigh: Callable[[slice, Entries], Float[Tensor, " m"]]) -> None:
        self.dtype, self._candidates, self._weigh = candidates.dtype, candidates, weigh

    def bins(
        self, low: Float[Tensor, " n"], high: Float[Tensor, " n"], base: Int[Tensor, " n"], shift: int
    ) -> Float[Tensor, "n bins"]:
        bins = torch.zeros(len(base), BINS, dtype=accumulator(self.dtype), device=base.device)
        for row_slice, entries in self._candidates.between(low, high):
            n, base_of_rows = row_slice.stop - row_slice.start, of_rows(base[row_slice], entries.rows)
            index = _digit(entries.logits, base_of_rows, shift)
            if n > 1:
                index += entries.rows.long() * ALL_BINS
            # float64: thousands of terms may be added to one bin, one after the other
            sums = torch.zeros(n * ALL_BINS, dtype=torch.float64, device=bins.device)
            sums.index_add_(0, index, self._weigh(row_slice, entries).double())
            bins[row_slice] += sums.view(n, ALL_BINS)[:, 1:-1]
        return bins


class LargestOnCpu:
    """This rank's k largest columns, each with weight 1, by partitioning its rows.

    The k-th largest logit of all ranks is at least as large as this rank's k-th largest. So after the first digit it is
    enough to list the few columns above this rank's k-th largest, which takes a fraction of another partition's time.
    """

    def __init__(self, logits: Float[Tensor, "*a v"], k: int, chunk_size: int | None) -> None:
        self.dtype, self._width, self._k = logits.dtype, logits.shape[-1], min(k, logits.shape[-1])
        self._blocks = list(row_blocks(logits, rows_per_block(logits, chunk_size)))
        self._kth: Tensor | None = None  # of this rank's columns
        self._listed = ListedWeights(Candidates(logits, chunk_size), one_each)

    def bins(
        self, low: Float[Tensor, " n"], high: Float[Tensor, " n"], base: Int[Tensor, " n"], shift: int
    ) -> Float[Tensor, "n bins"]:
        if self._kth is None or self._kth.isneginf().any():  # NaN counts as -inf, and a list leaves it out
            return self._bins_of_partitions(base, shift)
        return self._listed.bins(torch.maximum(low, self._kth), high, base, shift)

    def _bins_of_partitions(self, base: Int[Tensor, " n"], shift: int) -> Float[Tensor, "n bins"]:
        bins = torch.zeros(len(base), BINS, dtype=accumulator(self.dtype))
        if not self._k:
            return bins
        rows = max((len(block) for _, block in self._blocks), default=0)
        workspace = torch.empty(rows, self._width, dtype=accumulator(self.dtype))
        self._kth = torch.empty(len(base), dtype=workspace.dtype)
        for row_slice, block in self._blocks:
            n, largest = len(block), numpy_selection.largest(block, self._k, workspace)
            self._kth[row_slice] = largest[:, 0]
            index = _digit(largest.to(self.dtype), base[row_slice].unsqueeze(-1), shift)
            index += torch.arange(n).unsqueeze(-1) * ALL_BINS
            bins[row_slice] = torch.bincount(index.flatten(), minlength=n * ALL_BINS).view(n, ALL_BINS)[:, 1:-1]
        return bins


def one_each(row_slice: slice, entries: Entries) -> Float[Tensor, " m"]:
    """A weight of 1 per entry, which counts the entries."""
    return torch.ones(entries.rows.shape, dtype=torch.float64, device=entries.rows.device)


def _digit(z: Float[Tensor, "*m"], base: Int[Tensor, "*#m"], shift: int) -> Int[Tensor, "*m"]:
    """The next digit of each logit, plus 1, if its leading digits are `base`; 0 below that, ALL_BINS - 1 above."""
    return (order_keys(z) >> shift).sub_(base).clamp_(-1, BINS).add_(1)
