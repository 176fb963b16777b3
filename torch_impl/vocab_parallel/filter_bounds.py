"""Limits and bounds of top-k, top-p and min-p filters, and the columns between two bounds.

Sort a row by descending logit, and equal logits by ascending id: the tokens that top-k and top-p keep are a prefix. A
few numbers describe that prefix (`FilterBounds`, `Ties`), and every rank can tell which of its columns belong to it.
`topk_by_lists` and `topk_by_radix` compute the bounds in two ways; the second reads logits through `Candidates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torch_impl.vocab_parallel import long_rows, numpy_selection
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block, shifted_logits

# A list is stored if it is short or takes at most 1 / PART of its block's bytes; an entry takes 8 bytes and its logit.
SHORT, PART = 64, 20
# Limits of entries and rows processed together: each entry takes a few more integers then, each row 256 sums.
JOINED, JOINED_ROWS = 1 << 14, 256
# On a GPU columns are not counted before they are listed. A list of a full block takes several times the block's
# memory, so blocks are smaller by this factor.
FINER = 8


class Limits(NamedTuple):
    """The limits of a filter; None turns one off."""

    top_k: int | None
    top_p: float | None
    min_p: float | None = None

    @property
    def are_off(self) -> bool:
        return self.top_k is None and self.top_p is None and self.min_p is None


def limits_of(top_k: int | None, top_p: float | None, min_p: float | None = None) -> Limits:
    """The limits as numbers, None for each filter that is off."""
    return Limits(
        None if top_k is None or top_k <= 0 else int(top_k),
        None if top_p is None or top_p == 1 else float(top_p),
        None if min_p is None or min_p == 0 else float(min_p),
    )


def min_p_floor(row_max: Float[Tensor, "*n"], temperature: float, min_p: float) -> Float[Tensor, "*n"]:
    """The smallest logit with a probability of at least min_p times the largest: m + T log(min_p)."""
    # Rounded up: at a large m floats are coarse, and the sum would round down to a logit below the bound.
    exact = row_max.double() + temperature * math.log(min_p)
    floor = exact.to(row_max.dtype)
    return torch.where(floor.double() < exact, torch.nextafter(floor, torch.full_like(floor, math.inf)), floor)


class FilterBounds(NamedTuple):
    """The prefix of a row that a filter keeps: rows are sorted by descending logit, equal logits by ascending id."""

    row_max: Float[Tensor, " n"]
    row_sum_m1: Float[Tensor, " n"]  # sum of exp((z - row_max) / temperature) over the prefix without its first token
    threshold: Float[Tensor, " n"]  # the logit of the prefix's last token
    ties: Float[Tensor, " n"]  # number of tokens with that logit in the prefix, over all ranks


class Ties(NamedTuple):
    """Logits that equal the threshold, if the filter keeps only some of them."""

    counts: Float[Tensor, "r n"]  # number of ties on each rank
    before_target: Float[Tensor, "r n"]  # number of the rank's ties before the target; +inf unless it has the target
    candidates: Candidates  # looks up this rank's ties


def room_for(row_sum_m1: Float[Tensor, "*n"], top_p: float) -> Float[Tensor, "*n"]:
    """p (1 + R) - 1, without cancellation as p -> 1: the bound on the mass between the first token and a kept one."""
    return top_p * row_sum_m1 - (1.0 - top_p)


def weight_of(z: Float[Tensor, "*n"], row_max: Float[Tensor, "*#n"], temperature: float) -> Float[Tensor, "*n"]:
    """exp((z - m) / temperature)."""
    return shifted_logits(z, row_max, temperature).exp()


def ties_within(
    room: Float[Tensor, "*n"], weight: Float[Tensor, "*n"], count: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """How many of `count` equal weights in a row have less than `room` before them."""
    fitting = torch.where(weight == 0, 0.0, torch.ceil(room / weight))
    return torch.minimum(fitting.clamp_min(0.0), count)


def keep_first(
    block: Float[Tensor, "n v"], threshold: Float[Tensor, " n"], last_tie: Int[Tensor, " n"] | None = None
) -> Float[Tensor, "n v"]:
    """The block with -inf in every column that is not kept.

    A column is kept if it is above the threshold, or equals it and is not after column `last_tie` (None: all ties are
    kept). NaN stays. On a CPU long rows are returned in float32 or wider.
    """
    if long_rows.applies_to(block):
        return _keep_first_of_long_rows(block.to(threshold.dtype), threshold, last_tie)
    is_dropped = block < threshold.unsqueeze(-1)
    if last_tie is not None:
        columns = torch.arange(block.shape[-1], dtype=last_tie.dtype, device=block.device)
        is_dropped |= (block == threshold.unsqueeze(-1)) & (columns > last_tie.unsqueeze(-1))
    return block.masked_fill(is_dropped, -math.inf)


def _keep_first_of_long_rows(
    block: Float[Tensor, "n v"], threshold: Float[Tensor, " n"], last_tie: Int[Tensor, " n"] | None
) -> Float[Tensor, "n v"]:
    """`keep_first` in one pass. `torch.threshold` tests z > x, so z >= t becomes z > the float before t."""
    kept, width = torch.empty_like(block), block.shape[-1]
    before = torch.nextafter(threshold, torch.full_like(threshold, -math.inf)).tolist()
    ends = [width] * len(block) if last_tie is None else (last_tie + 1).clamp(0, width).tolist()
    for logits, out, below, at, end in zip(block, kept, before, threshold.tolist(), ends, strict=True):
        torch.threshold(logits[:end], below, -math.inf, out=out[:end])
        if end < width:
            torch.threshold(logits[end:], at, -math.inf, out=out[end:])
    return kept


class Entries(NamedTuple):
    """Entries of consecutive rows, ordered by row (counted from the first one), then by column."""

    rows: Int[Tensor, " m"]
    columns: Int[Tensor, " m"]
    logits: Float[Tensor, " m"]


def of_rows(x: Shaped[Tensor, " n"], rows: Int[Tensor, " m"]) -> Shaped[Tensor, " m"]:
    """x of each entry's row."""
    return x.expand(len(rows)) if len(x) == 1 else x.index_select(0, rows)


class Candidates:
    """Columns of each row between two bounds, as short lists in id order; bounds may only become narrower.

    Each rank reads its own columns only. A filter finds one logit in several rounds, and each round narrows the bounds.
    Once the list of a row block is short, it is stored and the block is not read again: rows with a few likely tokens
    are read once or twice.
    """

    def __init__(self, logits: Float[Tensor, "*a v"], chunk_size: int | None) -> None:
        rows = max(1, rows_per_block(logits, chunk_size) // (1 if logits.is_cpu else FINER))
        self.dtype, self.device = logits.dtype, logits.device
        self._blocks = list(row_blocks(logits, rows))
        self._lists: list[tuple[slice, Entries]] = []

    def between(self, low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Iterator[tuple[slice, Entries]]:
        """Yield (slice of rows, their columns with low <= z <= high and possibly more), some rows at a time.

        A list from an earlier round also has columns outside the bounds; the caller must select. Slices may overlap,
        but no entry is repeated.
        """
        long, lists, group, count = [], [], [], 0
        for row_slice, block in self._blocks:
            for part, entries in _entries_between(block, low[row_slice], high[row_slice]):
                rows = slice(row_slice.start + part.start, row_slice.start + part.stop)
                if rows != row_slice or len(entries.rows) > SHORT + block.nbytes // (PART * (8 + block.itemsize)):
                    if part.start == 0:
                        long.append((row_slice, block))
                    yield rows, entries
                    continue
                count += len(entries.rows)
                if group and (count > JOINED or rows.stop - group[0][0].start > JOINED_ROWS):
                    lists.append(_join_lists(group))
                    group, count = [], len(entries.rows)
                group.append((rows, entries))
        self._blocks = long
        self._lists += [*lists, _join_lists(group)] if group else lists
        yield from self._lists


def ordinals(flags: Bool[Tensor, " m"], rows: Int[Tensor, " m"], n: int) -> Int[Tensor, " m"]:
    """For each flagged entry, the number of flagged entries before it in its row."""
    per_row = count_flags(flags, rows, n)
    before_row = per_row.cumsum(0) - per_row
    return flags.cumsum(0) - 1 - before_row[rows]


def count_flags(flags: Bool[Tensor, " m"], rows: Int[Tensor, " m"], n: int) -> Int[Tensor, " n"]:
    """The number of flagged entries of each row."""
    return torch.zeros(n, dtype=torch.int64, device=flags.device).index_add_(0, rows, flags.long())


def _join_lists(group: list[tuple[slice, Entries]]) -> tuple[slice, Entries]:
    """One list from several in the order of their rows; each list costs many small operations, however short it is."""
    start = group[0][0].start
    rows = torch.cat([entries.rows + (row_slice.start - start) for row_slice, entries in group])
    columns, logits = (torch.cat([entries[i] for _, entries in group]) for i in (1, 2))
    return slice(start, group[-1][0].stop), Entries(rows, columns, logits)


def _entries_between(
    block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]
) -> Iterator[tuple[slice, Entries]]:
    """Entries between the bounds, for all rows of the block at once or, if they are many, for some rows at a time."""
    if block.is_cpu:
        for part, *entries in numpy_selection.columns_between(block, low, high):
            yield part, Entries(*entries)
    else:
        yield slice(0, len(block)), _entries_elsewhere(block, low, high)


def _entries_elsewhere(block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Entries:
    inside = (block >= low.unsqueeze(-1)) & (block <= high.unsqueeze(-1))
    rows, columns = inside.nonzero(as_tuple=True)
    return Entries(rows.int(), columns.int(), block[rows, columns])
