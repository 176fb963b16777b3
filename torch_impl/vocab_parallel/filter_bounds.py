"""What a filter keeps of a row: its limits, its bounds, and the columns between two bounds.

In descending order of the logits, of equal ones the lowest id first, the tokens that top-k and top-p keep are the first
ones of a row. So a few numbers describe them (`FilterBounds`, `Ties`), and every rank knows which of its columns they
mean. `topk_by_lists` and `topk_by_radix` are two ways to the bounds; `Candidates` is how the second one looks at
logits.
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

# A list is kept if it is short, or takes at most 1 / PART of its block's bytes; an entry takes 8 and its logit.
SHORT, PART = 64, 20
# Entries that are looked at together, and rows: each entry takes a few integers more then, each row 256 sums.
JOINED, JOINED_ROWS = 1 << 14, 256
# Where nothing is read back to count them, all columns of a block may be listed, which takes several times its memory.
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
    """The limits, None where one is off."""
    return Limits(
        None if top_k is None or top_k <= 0 else int(top_k),
        None if top_p is None or top_p == 1 else float(top_p),
        None if min_p is None or min_p == 0 else float(min_p),
    )


def min_p_floor(row_max: Float[Tensor, "*n"], temperature: float, min_p: float) -> Float[Tensor, "*n"]:
    """The smallest logit whose probability is at least min_p times that of the largest one: m + T log(min_p)."""
    # Rounded up: where floats are coarse at m, the sum would round down to a logit that is below the bound.
    exact = row_max.double() + temperature * math.log(min_p)
    floor = exact.to(row_max.dtype)
    return torch.where(floor.double() < exact, torch.nextafter(floor, torch.full_like(floor, math.inf)), floor)


class FilterBounds(NamedTuple):
    """The first tokens of a row, in descending order of the logits and of equal ones the lowest id first."""

    row_max: Float[Tensor, " n"]
    row_sum_m1: Float[Tensor, " n"]  # sum of exp((z - row_max) / temperature) over the kept tokens but the first
    threshold: Float[Tensor, " n"]  # the last one's logit
    ties: Float[Tensor, " n"]  # how many tokens of that logit are kept, over all ranks


class Ties(NamedTuple):
    """Logits that equal the threshold, where not all of them are kept."""

    counts: Float[Tensor, "r n"]  # how many each rank has
    before_target: Float[
        Tensor, "r n"
    ]  # how many of the rank precede the target; +inf on other ranks than the target's
    candidates: Candidates  # where this rank's are looked up


def room_for(row_sum_m1: Float[Tensor, "*n"], top_p: float) -> Float[Tensor, "*n"]:
    """What may lie before a kept token besides the first: less than p (1 + R) - 1, without cancellation as p -> 1."""
    return top_p * row_sum_m1 - (1.0 - top_p)


def weight_of(z: Float[Tensor, "*n"], row_max: Float[Tensor, "*#n"], temperature: float) -> Float[Tensor, "*n"]:
    """exp((z - m) / temperature)."""
    return shifted_logits(z, row_max, temperature).exp()


def ties_within(
    room: Float[Tensor, "*n"], weight: Float[Tensor, "*n"], count: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """How many of `count` equal weights, one after another, have less than `room` before them."""
    fitting = torch.where(weight == 0, 0.0, torch.ceil(room / weight))
    return torch.minimum(fitting.clamp_min(0.0), count)


def keep_first(
    block: Float[Tensor, "n v"], threshold: Float[Tensor, " n"], last_tie: Int[Tensor, " n"] | None = None
) -> Float[Tensor, "n v"]:
    """The columns above the threshold and those at it up to column `last_tie` (None: all); -inf in place of others.

    NaN stays. On a CPU long rows come back in float32 or wider.
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
    """One pass: `threshold` keeps what is above a number, and z >= t is z above the number before t."""
    kept, width = torch.empty_like(block), block.shape[-1]
    before = torch.nextafter(threshold, torch.full_like(threshold, -math.inf)).tolist()
    ends = [width] * len(block) if last_tie is None else (last_tie + 1).clamp(0, width).tolist()
    for logits, out, below, at, end in zip(block, kept, before, threshold.tolist(), ends, strict=True):
        torch.threshold(logits[:end], below, -math.inf, out=out[:end])
        if end < width:
            torch.threshold(logits[end:], at, -math.inf, out=out[end:])
    return kept


class Entries(NamedTuple):
    """Entries of some rows, ordered by row (counted from the first of them), then by column."""

    rows: Int[Tensor, " m"]
    columns: Int[Tensor, " m"]
    logits: Float[Tensor, " m"]


def of_rows(x: Shaped[Tensor, " n"], rows: Int[Tensor, " m"]) -> Shaped[Tensor, " m"]:
    """The number of its row for each entry."""
    return x.expand(len(rows)) if len(x) == 1 else x.index_select(0, rows)


class Candidates:
    """Columns of each row between two bounds that only become narrower, as short lists in id order.

    Each rank reads its own columns only. A filter finds one logit in several rounds, each with narrower bounds than the
    one before. Once a row block's list is short it is stored and the block is not read again, so that rows
    with a few likely tokens are read once or twice.
    """

    def __init__(self, logits: Float[Tensor, "*a v"], chunk_size: int | None) -> None:
        rows = max(1, rows_per_block(logits, chunk_size) // (1 if logits.is_cpu else FINER))
        self.dtype, self.device = logits.dtype, logits.device
        self._blocks = list(row_blocks(logits, rows))
        self._lists: list[tuple[slice, Entries]] = []

    def between(self, low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Iterator[tuple[slice, Entries]]:
        """Some rows at a time: their slice, and at least their columns with low <= z <= high.

        A list of an earlier round has columns outside the bounds too: whoever reads it selects. Slices may
        overlap, but no entry comes twice.
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
    """Of each flagged entry: how many flagged ones of its row come before it."""
    per_row = count_flags(flags, rows, n)
    before_row = per_row.cumsum(0) - per_row
    return flags.cumsum(0) - 1 - before_row[rows]


def count_flags(flags: Bool[Tensor, " m"], rows: Int[Tensor, " m"], n: int) -> Int[Tensor, " n"]:
    """How many entries of each row are flagged."""
    return torch.zeros(n, dtype=torch.int64, device=flags.device).index_add_(0, rows, flags.long())


def _join_lists(group: list[tuple[slice, Entries]]) -> tuple[slice, Entries]:
    """Lists in order of their rows as one: each costs many small operations, however short it is."""
    start = group[0][0].start
    rows = torch.cat([entries.rows + (row_slice.start - start) for row_slice, entries in group])
    columns, logits = (torch.cat([entries[i] for _, entries in group]) for i in (1, 2))
    return slice(start, group[-1][0].stop), Entries(rows, columns, logits)


def _entries_between(
    block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]
) -> Iterator[tuple[slice, Entries]]:
    """Entries of consecutive rows of the block: all of them together, unless they are many."""
    if block.is_cpu:
        for part, *entries in numpy_selection.columns_between(block, low, high):
            yield part, Entries(*entries)
    else:
        yield slice(0, len(block)), _entries_elsewhere(block, low, high)


def _entries_elsewhere(block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Entries:
    inside = (block >= low.unsqueeze(-1)) & (block <= high.unsqueeze(-1))
    rows, columns = inside.nonzero(as_tuple=True)
    return Entries(rows.int(), columns.int(), block[rows, columns])
