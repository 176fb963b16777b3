"""Long top-k, and top-p without a short one, by radix selection over the ranks' columns.

The k-th largest logit is selected by counts of all columns; the last token of top-p by the masses of those that
can be kept. A token of a probability below (1 - p) / V cannot: all tokens of such probabilities together have
less than 1 - p.

`radix_selection.last_kept` finds both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import all_gather_stack
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.filter_bounds import (
    Candidates,
    Entries,
    FilterBounds,
    Limits,
    Ties,
    count_flags,
    min_p_floor,
    ordinals,
    room_for,
    ties_within,
    weight_of,
)
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions, block_function, row_statistics
from torch_impl.vocab_parallel.radix_selection import ListedWeights, last_kept
from torch_impl.vocab_parallel.sorted_rows import Ascending, SortedRows, SortedWeights
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

# The bound on a kept token's probability is halved: sums of that many rounded terms decide, not exact ones.
SLACK = 0.5

# Groups of columns for each of the k largest: with fewer their k-th largest maximum is a poor bound.
MIN_GROUPS = 2


def topk_by_radix(
    logits: Float[Tensor, "*a v"],
    column: Int[Tensor, "n 1"],
    options: LogprobOptions,
    limits: Limits,
    sorts_rows: bool | None = None,
) -> tuple[FilterBounds, Ties | None, Float[Tensor, " n"]]:
    """(bounds, ties unless all of them are kept, the target's logit).

    `sorts_rows`: whether columns are sorted row by row, as only a CPU can, or listed; None: sorted on a CPU.
    """
    sorts_rows = logits.device.type == "cpu" if sorts_rows is None else sorts_rows
    # 1. The smallest logit that top-k and min-p leave; statistics of what they leave, and the target's logit.
    kth = None if limits.top_k is None else _kth_largest(logits, limits.top_k, options, sorts_rows)
    if limits.min_p is not None:
        floor = min_p_floor(_largest(logits, options), options.temperature, limits.min_p)
        kth = floor if kth is None else torch.maximum(kth, floor)
    row_max_r, row_sum_m1_r, z_t = statistics.gather_statistics(
        _survivors(logits, column, kth, options), options.group
    ).unbind(1)
    row_max, row_sum_m1, first = statistics.global_row_sum_m1(row_max_r, row_sum_m1_r, options.temperature)
    kth = torch.full_like(row_max, -math.inf) if kth is None else kth
    survivors, z_t = (
        FilterBounds(row_max, row_sum_m1, kth, torch.full_like(kth, math.inf)),
        statistics.global_target_logit(z_t),
    )
    if limits.top_p is None:
        return survivors, None, z_t
    # 2. What top-p keeps of that.
    bounds, ties = _top_p(logits, column, survivors, first, options, limits.top_p, sorts_rows)
    return bounds, ties, z_t


def _largest(logits: Float[Tensor, "*a v"], options: LogprobOptions) -> Float[Tensor, " n"]:
    """The largest logit of each row. 1 all_gather of a number of each."""
    n, dtype = logits.shape[:-1].numel(), accumulator(logits.dtype)
    largest = torch.full((1, n), -math.inf, dtype=dtype, device=logits.device)
    if logits.shape[-1]:
        for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
            largest[0, row_slice] = block.amax(-1).to(dtype)
    return statistics.gather_statistics(largest, options.group).amax((0, 1))


def _kth_largest(
    logits: Float[Tensor, "*a v"], k: int, options: LogprobOptions, sorts_rows: bool
) -> Float[Tensor, " n"]:
    """The k-th largest logit of each row, of fewer than k the smallest. R all_reduce."""
    dtype = accumulator(logits.dtype)
    low = torch.full((logits.shape[:-1].numel(),), -math.inf, dtype=dtype, device=logits.device)
    room = torch.full_like(low, k)
    # Where every logit weighs 1, the last that has less than k above it is the k-th largest.
    if sorts_rows:
        return last_kept(SortedWeights(SortedRows(logits, options.chunk_size, k)), low, room, options.group)[0]
    # A lower bound first: `last_kept` then visits only the logits above it.
    group_size = logits.shape[-1] // (MIN_GROUPS * k)
    if group_size > 1:
        for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
            low[row_slice] = _kth_largest_of_groups(block, k, group_size).to(dtype)

    def one(row_slice: slice, entries: Entries) -> Tensor:
        return torch.ones(entries.rows.shape, dtype=dtype, device=low.device)

    return last_kept(ListedWeights(Candidates(logits, options.chunk_size), one), low, room, options.group)[0]


def _kth_largest_of_groups(block: Float[Tensor, "n v"], k: int, group_size: int) -> Float[Tensor, " n"]:
    """The k-th largest of the groups' maxima: k columns of this rank reach it, so the k-th largest of all does too."""
    groups = block.shape[-1] // group_size
    maxima = block[:, : groups * group_size].unflatten(-1, (groups, group_size)).amax(-1)
    return maxima.topk(k).values[:, -1]


def _survivors(
    logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], kth: Float[Tensor, " n"] | None, options: LogprobOptions
) -> Float[Tensor, "f n"]:
    """This rank's statistics of the logits that are not below the k-th largest, if there is one."""
    if kth is None:
        return row_statistics(logits, column, options)
    rank_statistics = torch.empty(3, len(column), dtype=accumulator(logits.dtype), device=logits.device)
    local = block_function(statistics.local_statistics, options, logits)
    for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
        left = block.masked_fill(block < kth[row_slice].unsqueeze(-1), -math.inf)
        rank_statistics[:, row_slice] = local(left, column[row_slice], options.temperature, False)
    return rank_statistics


def _top_p(
    logits: Float[Tensor, "*a v"],
    column: Int[Tensor, "n 1"],
    survivors: FilterBounds,
    first: Int[Tensor, " n"],
    options: LogprobOptions,
    top_p: float,
    sorts_rows: bool,
) -> tuple[FilterBounds, Ties]:
    """What top-p keeps of the survivors. 2 all_gather, R all_reduce. `first` is the rank of the largest logit."""
    row_max, row_sum_m1, temperature = survivors.row_max, survivors.row_sum_m1, options.temperature
    room = room_for(row_sum_m1, top_p)
    keeps_only_first = room <= 0  # the first token is enough; the rounds have nothing to find
    # 1. No token below `low` can be kept (see the top of this file).
    likely = (SLACK * (1.0 - top_p) / _columns_of_all(logits, options)).log()
    low = row_max + temperature * (likely.to(row_sum_m1.dtype) + row_sum_m1.log1p())
    low = torch.where(keeps_only_first, row_max, torch.maximum(low, survivors.threshold))
    # 2. The last logit of which a token is kept, and the mass above it.
    is_on_this_rank = first == (0 if options.group is None else options.group.rank())
    masses = Masses(row_max, is_on_this_rank, temperature)
    candidates = Candidates(logits, options.chunk_size)
    if sorts_rows:
        weights = SortedWeights(SortedRows(logits, options.chunk_size), masses.of_rows)
    else:
        weights = ListedWeights(candidates, masses.of_entries)
    threshold, above = last_kept(weights, low, room, options.group)
    threshold, above = torch.where(keeps_only_first, row_max, threshold), torch.where(keeps_only_first, 0.0, above)
    # 3. How many tokens of that very logit are kept.
    ties = _ties(candidates, column, threshold, options)
    first_is_tie = (threshold == row_max).to(row_sum_m1.dtype)
    weight = weight_of(threshold, row_max, temperature)
    more = ties_within(room - above, weight, ties.counts.sum(0) - first_is_tie)
    row_sum_m1_kept = torch.where(row_sum_m1.isnan(), row_sum_m1, above + more * weight)
    return FilterBounds(row_max, row_sum_m1_kept, threshold, more + first_is_tie), ties


class Masses(NamedTuple):
    """exp((z - m) / temperature) of this rank's logits, 0 for the first of a row: that one is the 1 of 1 + R."""

    row_max: Float[Tensor, " n"]
    first_is_on_this_rank: Bool[Tensor, " n"]
    temperature: float

    def of_entries(self, row_slice: slice, entries: Entries) -> Float[Tensor, " m"]:
        m = self.row_max[row_slice][entries.rows]
        is_first = (entries.logits == m) & self.first_is_on_this_rank[row_slice][entries.rows]
        is_first &= ordinals(is_first, entries.rows, len(self.row_max[row_slice])) == 0
        return torch.where(is_first, 0.0, weight_of(entries.logits, m, self.temperature))

    def of_rows(self, row_slice: slice, rows: Ascending) -> Float[Tensor, "n c"]:
        m = self.row_max[row_slice].unsqueeze(-1)
        weights = weight_of(rows.logits, m, self.temperature)
        if not rows.logits.shape[-1]:
            return weights
        last = (rows.counts - 1).clamp_min(0)  # of equal ones any may be the first
        is_first = (rows.logits.gather(-1, last) == m) & self.first_is_on_this_rank[row_slice].unsqueeze(-1)
        return weights.scatter_(-1, last, torch.where(is_first, 0.0, weights.gather(-1, last)))


def _ties(
    candidates: Candidates, column: Int[Tensor, "n 1"], threshold: Float[Tensor, " n"], options: LogprobOptions
) -> Ties:
    """How many logits equal the threshold, and how many of them precede the target. One all_gather."""
    message = torch.zeros(2, len(threshold), dtype=threshold.dtype, device=threshold.device)
    target = column.squeeze(-1)
    for row_slice, entries in candidates.between(threshold, threshold):
        is_tie = entries.logits == threshold[row_slice][entries.rows]
        is_before = is_tie & (entries.columns < target[row_slice][entries.rows])
        n = len(threshold[row_slice])
        message[0, row_slice] += count_flags(is_tie, entries.rows, n)
        message[1, row_slice] += count_flags(is_before, entries.rows, n)
    message[1].masked_fill_(target < 0, math.inf)
    ties, before = statistics.gather_statistics(message, options.group).unbind(1)
    return Ties(ties, before, candidates)


def _columns_of_all(logits: Float[Tensor, "*a v"], options: LogprobOptions) -> Float[Tensor, ""]:
    """V, the columns of all ranks. One all_gather of one integer; it stays on the device."""
    width = torch.tensor([logits.shape[-1]], device=logits.device)
    widths = width if options.group is None else all_gather_stack(width, options.group)
    return widths.sum().double()
