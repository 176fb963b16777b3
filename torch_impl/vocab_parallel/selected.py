"""A long top-k, and top-p without a short one, by radix selection over the ranks' columns.

The k-th largest logit is selected by counts of all columns; the last token of top-p by the masses of those that
can be kept. A token of a probability below (1 - p) / V cannot: all tokens of such probabilities together have
less than 1 - p.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import gathered
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.candidates import Candidates, Found, counted, ordinals
from torch_impl.vocab_parallel.joint import Plan, chosen, statistics_of
from torch_impl.vocab_parallel.prefix import Prefix, Ties, room_for, ties_within, weight_of
from torch_impl.vocab_parallel.radix import last_kept
from torch_impl.vocab_parallel.rows import block_rows, row_blocks
from torch_impl.vocab_parallel.sampling_params import Limits

# The bound on a kept token's probability is halved: sums of that many rounded terms decide, not exact ones.
SLACK = 0.5
# Groups of columns for each of the k largest: with fewer their k-th largest maximum is no good bound.
FEWEST_GROUPS = 2


def cut_by_selection(
    logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], plan: Plan, limits: Limits
) -> tuple[Prefix, Ties | None, Float[Tensor, " n"]]:
    """(prefix, ties unless all of them are kept, the target's logit)."""
    kth = None if limits.top_k is None else _kth_largest(logits, limits.top_k, plan)
    m_r, rest_r, z_t = st.exchanged(_survivors(logits, column, kth, plan), plan.group).unbind(1)
    largest, rest, first = st.merged_rest(m_r, rest_r, plan.temperature)
    kth = torch.full_like(largest, -math.inf) if kth is None else kth
    survivors, z_t = Prefix(largest, rest, kth, torch.full_like(kth, math.inf)), st.merged_target(z_t)
    if limits.top_p is None:
        return survivors, None, z_t
    prefix, ties = _top_p(logits, column, survivors, first, plan, limits.top_p)
    return prefix, ties, z_t


def _kth_largest(logits: Float[Tensor, "*a v"], k: int, plan: Plan) -> Float[Tensor, " n"]:
    """The k-th largest logit of each row, of fewer than k the smallest. R all_reduce."""
    dtype = accumulator(logits.dtype)
    low = torch.full((logits.shape[:-1].numel(),), -math.inf, dtype=dtype, device=logits.device)
    group_size = logits.shape[-1] // (FEWEST_GROUPS * k)
    if group_size > 1:
        for part, block in row_blocks(logits, block_rows(logits, plan.chunk_size)):
            low[part] = _kth_largest_of_groups(block, k, group_size).to(dtype)

    def one(part: slice, found: Found) -> Tensor:
        return torch.ones(found.rows.shape, dtype=dtype, device=low.device)

    return last_kept(Candidates(logits, plan.chunk_size), low, torch.full_like(low, k), one, plan.group)[0]


def _kth_largest_of_groups(block: Float[Tensor, "n v"], k: int, group_size: int) -> Float[Tensor, " n"]:
    """The k-th largest of the groups' maxima: k columns of this rank reach it, so the k-th largest of all does too."""
    groups = block.shape[-1] // group_size
    maxima = block[:, : groups * group_size].unflatten(-1, (groups, group_size)).amax(-1)
    return maxima.topk(k).values[:, -1]


def _survivors(
    logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], kth: Float[Tensor, " n"] | None, plan: Plan
) -> Float[Tensor, "f n"]:
    """This rank's statistics of the logits that are not below the k-th largest, if there is one."""
    if kth is None:
        return statistics_of(logits, column, plan)
    statistics = torch.empty(3, len(column), dtype=accumulator(logits.dtype), device=logits.device)
    local = chosen(st.local_statistics, plan, logits)
    for part, block in row_blocks(logits, block_rows(logits, plan.chunk_size)):
        left = block.masked_fill(block < kth[part].unsqueeze(-1), -math.inf)
        statistics[:, part] = local(left, column[part], plan.temperature, False)
    return statistics


def _top_p(
    logits: Float[Tensor, "*a v"],
    column: Int[Tensor, "n 1"],
    survivors: Prefix,
    first: Int[Tensor, " n"],
    plan: Plan,
    top_p: float,
) -> tuple[Prefix, Ties]:
    """What top-p keeps of the survivors. 2 all_gather, R all_reduce. `first` is the rank of the largest logit."""
    largest, rest, temperature = survivors.largest, survivors.rest, plan.temperature
    is_mine = first == (0 if plan.group is None else plan.group.rank())
    room = room_for(rest, top_p)
    is_alone = room <= 0  # the first token is enough; the rounds are to end at its logit

    def mass(part: slice, found: Found) -> Tensor:
        """Of each entry but the row's first, whose mass is the 1 of 1 + R."""
        m = largest[part][found.rows]
        is_largest = found.logits == m
        is_first = is_largest & is_mine[part][found.rows]
        is_first &= ordinals(is_first, found.rows, len(largest[part])) == 0
        others = torch.where(is_first, 0.0, weight_of(found.logits, m, temperature))
        return torch.where(is_alone[part][found.rows], is_largest.to(m.dtype), others)

    likely = (SLACK * (1.0 - top_p) / _columns_of_all(logits, plan)).log()
    low = largest + temperature * (likely.to(rest.dtype) + rest.log1p())
    candidates = Candidates(logits, plan.chunk_size)
    some_room = torch.where(is_alone, 1.0, room)
    threshold, above = last_kept(candidates, torch.maximum(low, survivors.threshold), some_room, mass, plan.group)
    ties = _ties(candidates, column, threshold, plan)
    first_is_tie = (threshold == largest).to(rest.dtype)
    weight = weight_of(threshold, largest, temperature)
    more = ties_within(room - above, weight, ties.counts.sum(0) - first_is_tie)
    kept_rest = torch.where(rest.isnan(), rest, above + more * weight)
    return Prefix(largest, kept_rest, threshold, more + first_is_tie), ties


def _ties(candidates: Candidates, column: Int[Tensor, "n 1"], threshold: Float[Tensor, " n"], plan: Plan) -> Ties:
    """How many logits equal the threshold, and how many of them precede the target. One all_gather."""
    told = torch.zeros(2, len(threshold), dtype=threshold.dtype, device=threshold.device)
    target = column.squeeze(-1)
    for part, found in candidates.between(threshold, threshold):
        is_tie = found.logits == threshold[part][found.rows]
        is_before = is_tie & (found.columns < target[part][found.rows])
        n = len(threshold[part])
        told[0, part] += counted(is_tie, found.rows, n)
        told[1, part] += counted(is_before, found.rows, n)
    told[1].masked_fill_(target < 0, math.inf)
    ties, before = st.exchanged(told, plan.group).unbind(1)
    return Ties(ties, before, candidates)


def _columns_of_all(logits: Float[Tensor, "*a v"], plan: Plan) -> Float[Tensor, ""]:
    """V, the columns of all ranks. One all_gather of one integer; it stays on the device."""
    own = torch.tensor([logits.shape[-1]], device=logits.device)
    everyone = own if plan.group is None else gathered(own, plan.group, 0, [1] * plan.group.size())
    return everyone.sum().double()
