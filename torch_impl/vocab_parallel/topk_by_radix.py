"""Long top-k, and top-p without a short one, by radix selection over the ranks' columns.

The k-th largest logit is selected by counts of all columns; the last token of top-p by the masses of those that
can be kept. A token of a probability below (1 - p) / V cannot: all tokens of such probabilities together have
less than 1 - p.

Radix selection (`last_kept`) finds the logit at which so much weight has gone by, in descending order, over all ranks.
Floats are ordered as their bit patterns are, once negative ones are mirrored. Eight bits at a time, every rank
adds up the weight of its candidates in 256 bins, the bins are summed over the ranks, and each row goes on
within the bin in which its weight runs out. No value is ever sorted, and the selection is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

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
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

BITS = 8
BINS = 1 << BITS
ROWS = 256  # rows whose bins are added up at a time
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Weight of each entry of a row block; the slice says which rows the block is.
Weigh = Callable[[slice, Entries], Float[Tensor, " m"]]

# The bound on a kept token's probability is halved: sums of that many rounded terms decide, not exact ones.
SLACK = 0.5

# Groups of columns for each of the k largest: with fewer their k-th largest maximum is a poor bound.
MIN_GROUPS = 2


def order_keys(z: Float[Tensor, "*a"]) -> Int[Tensor, "*a"]:
    """Integers in the order of the floats; equal floats, 0.0 and -0.0 too, have equal ones."""
    bits = (z + 0.0).view(INTEGER[z.itemsize]).long()  # -0.0 + 0.0 is 0.0
    return _mirror(bits, z.itemsize)


def float_of(keys: Int[Tensor, "*a"], dtype: torch.dtype) -> Float[Tensor, "*a"]:
    """The floats that `ordered` gives these integers."""
    return _mirror(keys, dtype.itemsize).to(INTEGER[dtype.itemsize]).view(dtype)


def last_kept(
    candidates: Candidates,
    low: Float[Tensor, " n"],
    room: Float[Tensor, " n"],
    weigh: Weigh,
    group: ProcessGroup | None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(z, weight above z): the smallest z >= low of positive weight that has less than `room` above it.

    One all_reduce of 256 sums per row for each byte of the logits' dtype; none where one rank has full rows.
    """
    dtype = candidates.dtype
    above = torch.zeros_like(room)
    prefix = torch.zeros(room.shape, dtype=torch.int64, device=room.device)
    lowest, highest = low, torch.full_like(low, math.inf)
    # Each pass fixes the next eight bits of every row's answer, from the sign on.
    for shift in reversed(range(0, BITS * dtype.itemsize, BITS)):
        is_first = shift + BITS == BITS * dtype.itemsize
        base = prefix - BINS // 2 if is_first else prefix << BITS  # the first digit has the sign
        bins = _bins(candidates, lowest, highest, base, shift, weigh)
        if group is not None:
            dist.all_reduce(bins, group=group)
        digit, above = _lowest_with_room(bins, above, room)
        prefix = base + digit
        lowest, highest = _bounds(prefix, shift, dtype, low)
    return float_of(prefix, dtype).to(above.dtype), above


def _bins(
    candidates: Candidates,
    low: Float[Tensor, " n"],
    high: Float[Tensor, " n"],
    base: Int[Tensor, " n"],
    shift: int,
    weigh: Weigh,
) -> Float[Tensor, "n bins"]:
    """Weight of this rank's candidates whose leading digits are the row's, by their next digit."""
    bins = torch.zeros(len(base), BINS, dtype=accumulator(candidates.dtype), device=candidates.device)
    for row_slice, entries in candidates.between(low, high):
        digit = (order_keys(entries.logits) >> shift) - base[row_slice][entries.rows]
        inside = (digit >= 0) & (digit < BINS)
        weight = torch.where(inside, weigh(row_slice, entries), 0.0)
        bin_index = entries.rows.long() * BINS + torch.where(inside, digit, 0)
        # float64: thousands of terms may fall into one bin, one after the other
        sums = torch.zeros(bins[row_slice].numel(), dtype=torch.float64, device=bins.device)
        bins[row_slice] += sums.index_add_(0, bin_index, weight.double()).view(-1, BINS)
    return bins


def _lowest_with_room(
    bins: Float[Tensor, "n bins"], above: Float[Tensor, " n"], room: Float[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """(bin, weight above it): the lowest bin of some weight that has less than `room` above it; some rows at a time."""
    lowest, weight = torch.empty(len(above), dtype=torch.int64, device=above.device), torch.empty_like(above)
    for row_slice, rows in row_blocks(bins, ROWS):
        before = above[row_slice].unsqueeze(-1) + _above_each(rows)
        goes_on = (rows > 0) & (before < room[row_slice].unsqueeze(-1))
        digit = goes_on.to(torch.uint8).argmax(-1, keepdim=True)  # the first of the largest: the lowest bin
        lowest[row_slice], weight[row_slice] = digit.squeeze(-1), before.gather(-1, digit).squeeze(-1)
    return lowest, weight


def _above_each(bins: Float[Tensor, "n bins"]) -> Float[Tensor, "n bins"]:
    """Weight in the bins of higher digits."""
    upto = bins.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(upto[:, 1:], (0, 1))


def _bounds(
    prefix: Int[Tensor, " n"], shift: int, dtype: torch.dtype, low: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The floats between which all have these leading digits; bit patterns beyond infinity stand for it."""
    smallest = float_of(prefix << shift, dtype).to(low.dtype)
    largest = float_of(((prefix + 1) << shift) - 1, dtype).to(low.dtype)
    return torch.where(smallest > low, smallest, low), torch.where(largest.isnan(), math.inf, largest)


def _mirror(bits: Int[Tensor, "*a"], itemsize: int) -> Int[Tensor, "*a"]:
    return torch.where(bits < 0, bits ^ ((1 << (8 * itemsize - 1)) - 1), bits)


def topk_by_radix(
    logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], options: LogprobOptions, limits: Limits
) -> tuple[FilterBounds, Ties | None, Float[Tensor, " n"]]:
    """(bounds, ties unless all of them are kept, the target's logit)."""
    # 1. The smallest logit that top-k and min-p leave; statistics of what they leave, and the target's logit.
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
    # 2. What top-p keeps of that.
    bounds, ties = _top_p(logits, column, survivors, first, options, limits.top_p)
    return bounds, ties, z_t


def _largest(logits: Float[Tensor, "*a v"], options: LogprobOptions) -> Float[Tensor, " n"]:
    """The largest logit of each row. 1 all_gather of a number of each."""
    n, dtype = logits.shape[:-1].numel(), accumulator(logits.dtype)
    largest = torch.full((1, n), -math.inf, dtype=dtype, device=logits.device)
    if logits.shape[-1]:
        for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
            largest[0, row_slice] = block.amax(-1).to(dtype)
    return statistics.gather_statistics(largest, options.group).amax((0, 1))


def _kth_largest(logits: Float[Tensor, "*a v"], k: int, options: LogprobOptions) -> Float[Tensor, " n"]:
    """The k-th largest logit of each row, of fewer than k the smallest. R all_reduce."""
    dtype = accumulator(logits.dtype)
    low = torch.full((logits.shape[:-1].numel(),), -math.inf, dtype=dtype, device=logits.device)
    # A lower bound first: `last_kept` then visits only the logits above it.
    group_size = logits.shape[-1] // (MIN_GROUPS * k)
    if group_size > 1:
        for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
            low[row_slice] = _kth_largest_of_groups(block, k, group_size).to(dtype)

    def one(row_slice: slice, entries: Entries) -> Tensor:
        return torch.ones(entries.rows.shape, dtype=dtype, device=low.device)

    # Where every logit weighs 1, the last that has less than k above it is the k-th largest.
    return last_kept(Candidates(logits, options.chunk_size), low, torch.full_like(low, k), one, options.group)[0]


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
) -> tuple[FilterBounds, Ties]:
    """What top-p keeps of the survivors. 2 all_gather, R all_reduce. `first` is the rank of the largest logit."""
    row_max, row_sum_m1, temperature = survivors.row_max, survivors.row_sum_m1, options.temperature
    is_on_this_rank = first == (0 if options.group is None else options.group.rank())
    room = room_for(row_sum_m1, top_p)
    keeps_only_first = room <= 0  # the first token is enough; the rounds are to end at its logit

    def mass(row_slice: slice, entries: Entries) -> Tensor:
        """Of each entry but the row's first, whose mass is the 1 of 1 + R."""
        m = row_max[row_slice][entries.rows]
        is_row_max = entries.logits == m
        is_first = is_row_max & is_on_this_rank[row_slice][entries.rows]
        is_first &= ordinals(is_first, entries.rows, len(row_max[row_slice])) == 0
        weights = torch.where(is_first, 0.0, weight_of(entries.logits, m, temperature))
        return torch.where(keeps_only_first[row_slice][entries.rows], is_row_max.to(m.dtype), weights)

    # 1. No token below `low` can be kept (see the top of this file).
    likely = (SLACK * (1.0 - top_p) / _columns_of_all(logits, options)).log()
    low = row_max + temperature * (likely.to(row_sum_m1.dtype) + row_sum_m1.log1p())
    # 2. The last logit of which a token is kept, and the mass above it.
    candidates = Candidates(logits, options.chunk_size)
    some_room = torch.where(keeps_only_first, 1.0, room)
    threshold, above = last_kept(candidates, torch.maximum(low, survivors.threshold), some_room, mass, options.group)
    # 3. How many tokens of that very logit are kept.
    ties = _ties(candidates, column, threshold, options)
    first_is_tie = (threshold == row_max).to(row_sum_m1.dtype)
    weight = weight_of(threshold, row_max, temperature)
    more = ties_within(room - above, weight, ties.counts.sum(0) - first_is_tie)
    row_sum_m1_kept = torch.where(row_sum_m1.isnan(), row_sum_m1, above + more * weight)
    return FilterBounds(row_max, row_sum_m1_kept, threshold, more + first_is_tie), ties


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
