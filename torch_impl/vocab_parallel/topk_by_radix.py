"""Long top-k, and top-p without a short top-k, by radix selection over the ranks' columns.

Counts of all columns select the k-th largest logit. Probability masses select the last token of top-p, among the
columns that can be kept. A token with a probability below (1 - p) / V cannot be kept: all such tokens together have
less than 1 - p. Of 65,536 normal logits with deviation 4, at p = 0.9, an eighth are above this bound, and 1.4 % are
above a second bound, (1 - p) / TAIL. So the columns above the second bound are listed first; if their mass is too
small, the first bound is used.

Both selections use `radix_selection.last_kept`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.filter_bounds import (
    Candidates,
    Entries,
    FilterBounds,
    Limits,
    Ties,
    count_flags,
    keep_first,
    min_p_floor,
    of_rows,
    room_for,
    ties_within,
    weight_of,
)
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions, block_function, row_statistics
from torch_impl.vocab_parallel.radix_selection import LargestOnCpu, ListedWeights, Weights, last_kept, one_each
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

# The first bound on a kept token's probability is halved, to allow for the rounding of long sums.
SLACK = 0.5

# The second bound is (1 - p) / TAIL: this many tokens at the bound have a mass of 1 - p together.
TAIL = 2048

# A share of a row's mass, larger than the rounding of its sums. Smaller differences may be rounding and are ignored.
RESOLUTION = 2.0**-16

# At least this many groups of columns per selected logit: with fewer, the k-th largest group maximum is a poor bound.
MIN_GROUPS = 2


def topk_by_radix(
    logits: Float[Tensor, "*a v"],
    column: Int[Tensor, "n 1"],
    options: LogprobOptions,
    limits: Limits,
) -> tuple[FilterBounds, Ties | None, Float[Tensor, " n"]]:
    """(bounds, ties or None if all ties are kept, the target's logit)."""
    # 1. The smallest logit that top-k and min-p keep, the statistics of the kept logits, and the target's logit.
    kth = None if limits.top_k is None else _kth_largest(logits, limits.top_k, options)
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
    # 2. Top-p among these.
    bounds, ties = _top_p(logits, column, survivors, first, options, limits.top_p)
    return bounds, ties, z_t


def _largest(logits: Float[Tensor, "*a v"], options: LogprobOptions) -> Float[Tensor, " n"]:
    """The largest logit of each row. 1 all_gather of one number per row."""
    n, dtype = logits.shape[:-1].numel(), accumulator(logits.dtype)
    largest = torch.full((1, n), -math.inf, dtype=dtype, device=logits.device)
    if logits.shape[-1]:
        for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
            largest[0, row_slice] = block.amax(-1).to(dtype)
    return statistics.gather_statistics(largest, options.group).amax((0, 1))


def _kth_largest(logits: Float[Tensor, "*a v"], k: int, options: LogprobOptions) -> Float[Tensor, " n"]:
    """The k-th largest logit of each row, or the smallest if a row has fewer than k. R all_reduce.

    With weight 1 per logit, it is the smallest logit with a weight of less than k above it.
    """
    low = torch.full((logits.shape[:-1].numel(),), -math.inf, dtype=accumulator(logits.dtype), device=logits.device)
    room = torch.full_like(low, k)
    counts: Weights
    if logits.is_cpu:
        counts = LargestOnCpu(logits, k, options.chunk_size)
    else:
        counts = ListedWeights(_listed_above(logits, k, options.chunk_size, low), one_each)
    return last_kept(counts, low, room, options.group)[0]


def _listed_above(
    logits: Float[Tensor, "*a v"], k: int, chunk_size: int | None, low: Float[Tensor, " n"]
) -> Candidates:
    """The columns as candidates; writes a lower bound of the k-th largest to `low`, so that lists are short."""
    group_size = logits.shape[-1] // (MIN_GROUPS * k)
    if group_size > 1:
        for row_slice, block in row_blocks(logits, rows_per_block(logits, chunk_size)):
            low[row_slice] = _kth_largest_of_groups(block, k, group_size)
    return Candidates(logits, chunk_size)


def _kth_largest_of_groups(block: Float[Tensor, "n v"], k: int, group_size: int) -> Float[Tensor, " n"]:
    """The k-th largest of the groups' maxima, a lower bound: at least k columns of this rank are that large."""
    groups = block.shape[-1] // group_size
    maxima = block[:, : groups * group_size].unflatten(-1, (group_size, groups)).amax(-2)
    maxima.nan_to_num_(-math.inf, math.inf, -math.inf)  # NaN is not a candidate
    return maxima.topk(k).values[:, -1]


def _survivors(
    logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], kth: Float[Tensor, " n"] | None, options: LogprobOptions
) -> Float[Tensor, "f n"]:
    """This rank's statistics of the logits that reach `kth`, or of all logits if `kth` is None."""
    if kth is None:
        return row_statistics(logits, column, options)
    rank_statistics = torch.empty(3, len(column), dtype=accumulator(logits.dtype), device=logits.device)
    local = block_function(statistics.local_statistics, options, logits)
    for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
        survivors = keep_first(block, kth[row_slice])
        rank_statistics[:, row_slice] = local(survivors, column[row_slice], options.temperature, False)
    return rank_statistics


def _top_p(
    logits: Float[Tensor, "*a v"],
    column: Int[Tensor, "n 1"],
    survivors: FilterBounds,
    first: Int[Tensor, " n"],
    options: LogprobOptions,
    top_p: float,
) -> tuple[FilterBounds, Ties]:
    """(bounds, ties) of top-p among the survivors, the tokens that top-k and min-p keep.

    `first` is the rank of the largest logit. 2 all_gather, R all_reduce.
    """
    row_max, row_sum_m1, temperature = survivors.row_max, survivors.row_sum_m1, options.temperature
    room = room_for(row_sum_m1, top_p)
    keeps_only_first = room <= 0  # the first token is enough, and the rounds have nothing to select
    # 1. No token below `low` can be kept.
    is_on_this_rank = first == (0 if options.group is None else options.group.rank())
    masses = Masses(row_max, is_on_this_rank, temperature)
    low, candidates = _likely(logits, survivors, masses, room, top_p, options)
    # 2. The smallest logit that is kept, and the mass above it.
    threshold, above = last_kept(ListedWeights(candidates, masses.of_entries), low, room, options.group)
    threshold, above = torch.where(keeps_only_first, row_max, threshold), torch.where(keeps_only_first, 0.0, above)
    # 3. How many tokens with exactly that logit are kept.
    ties = _ties(candidates, column, threshold, options)
    first_is_tie = (threshold == row_max).to(row_sum_m1.dtype)
    weight = weight_of(threshold, row_max, temperature)
    more = ties_within(room - above, weight, ties.counts.sum(0) - first_is_tie)
    row_sum_m1_kept = torch.where(row_sum_m1.isnan(), row_sum_m1, above + more * weight)
    return FilterBounds(row_max, row_sum_m1_kept, threshold, more + first_is_tie), ties


def _likely(
    logits: Float[Tensor, "*a v"],
    survivors: FilterBounds,
    masses: Masses,
    room: Float[Tensor, " n"],
    top_p: float,
    options: LogprobOptions,
) -> tuple[Float[Tensor, " n"], Candidates]:
    """(low, columns): top-p keeps no token below `low`, and the columns above `low` are listed. 1 all_gather.

    With a room of 0 or less, the first token is enough, and no other column is listed.
    """
    row_max, log_total = survivors.row_max, survivors.row_sum_m1.log1p()

    def logit_at(log_probability: float) -> Float[Tensor, " n"]:
        z = row_max + options.temperature * (log_probability + log_total)
        return torch.where(room <= 0, row_max, torch.maximum(z, survivors.threshold))

    # 1. The columns above the second bound, and their mass. The message also has this rank's width, for step 3.
    guess = logit_at(math.log((1.0 - top_p) / TAIL))
    candidates = Candidates(logits, options.chunk_size)
    # float64: in float32 a sum of thousands of equal masses would be off by more than RESOLUTION.
    listed = torch.zeros(len(room) + 1, dtype=torch.float64, device=room.device)
    if 1.0 - top_p > RESOLUTION:  # otherwise no listed mass is enough
        for row_slice, entries in candidates.between(guess, torch.full_like(guess, math.inf)):
            mass = masses.of_entries(row_slice, entries).double()
            listed[:-1][row_slice].index_add_(0, entries.rows, mass)
    listed[-1] = logits.shape[-1]
    listed = statistics.gather_statistics(listed.to(room.dtype).unsqueeze(0), options.group).sum((0, 1))
    # 2. The list is enough if the mass below the bound, over all ranks, is less than 1 - p. NaN compares as False.
    tail = survivors.row_sum_m1 - listed[:-1]
    has_more = tail > (1.0 - top_p - RESOLUTION) * (1.0 + survivors.row_sum_m1)
    if not has_more.any():
        return guess, candidates
    # 3. Rows without enough mass take the first bound.
    certain = logit_at(math.log(SLACK * (1.0 - top_p) / max(float(listed[-1]), 1.0)))
    return torch.where(has_more, torch.minimum(certain, guess), guess), Candidates(logits, options.chunk_size)


class Masses(NamedTuple):
    """exp((z - m) / temperature) of this rank's logits; 0 for a row's first token, which the sum 1 + R counts as 1."""

    row_max: Float[Tensor, " n"]
    first_is_on_this_rank: Bool[Tensor, " n"]
    temperature: float

    def of_entries(self, row_slice: slice, entries: Entries) -> Float[Tensor, " m"]:
        m = of_rows(self.row_max[row_slice], entries.rows)
        # The entries that equal their row's maximum are few and ordered by row; mark the first of each row.
        largest = (entries.logits == m).nonzero().squeeze(-1)
        rows_of_largest = entries.rows[largest].long()
        is_first = self.first_is_on_this_rank[row_slice][rows_of_largest]
        is_first[1:] &= rows_of_largest.diff() > 0
        return weight_of(entries.logits, m, self.temperature).index_fill_(0, largest[is_first], 0.0)


def _ties(
    candidates: Candidates, column: Int[Tensor, "n 1"], threshold: Float[Tensor, " n"], options: LogprobOptions
) -> Ties:
    """Ties with the threshold: their number on each rank, and the number before the target. One all_gather."""
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
