"""Which tokens of a row a sampler keeps, without any rank seeing the whole row.

In descending order of the logits, of equal ones the lowest id first, the kept tokens are a prefix. So three
numbers say it all: the last logit that is kept, how many tokens of that logit are, and what the kept ones add
up to. All ranks agree on them; each works out which of its own columns they mean.

A short top-k comes from the ranks' lists of their largest logits, in one exchange (listed.py). Anything else is
closed in on by radix selection (selected.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.candidates import Candidates, ordinals
from torch_impl.vocab_parallel.joint import Plan
from torch_impl.vocab_parallel.listed import cut_by_lists
from torch_impl.vocab_parallel.sampling_params import Limits
from torch_impl.vocab_parallel.selected import cut_by_selection

LONGEST_LIST = 1024


class KeptSet(NamedTuple):
    """What a rank needs to know of the kept tokens, per row; has_target is for all ranks, the rest for its columns."""

    normaliser: st.Normaliser
    threshold: Float[Tensor, " n"]
    last_tie: Int[Tensor, " n"]  # the last column at the threshold that is kept
    z_t: Float[Tensor, " n"]  # the target's logit; +inf where nobody owns it
    has_target: Bool[Tensor, " n"]


def kept_set(logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], plan: Plan, limits: Limits) -> KeptSet:
    """The kept tokens of each row.

    Collectives: 1 all_gather with top_k <= 1024; else 1 all_gather and R all_reduce for top_k, and 3 all_gather
    and R all_reduce for top_p (1 all_gather of them shared): R is the bytes of a logit.
    """
    in_lists = limits.top_k is not None and limits.top_k <= LONGEST_LIST
    cut = cut_by_lists if in_lists else cut_by_selection
    prefix, ties, z_t = cut(logits, column, plan, limits)
    normaliser = st.Normaliser(prefix.largest, prefix.rest.log1p())
    if ties is None:  # all of them stay
        last_tie = torch.full_like(column.squeeze(-1), logits.shape[-1])
        return KeptSet(normaliser, prefix.threshold, last_tie, z_t, z_t >= prefix.threshold)
    before = ties.counts.cumsum(0) - ties.counts
    rank = 0 if plan.group is None else plan.group.rank()
    own = torch.minimum((prefix.ties - before[rank]).clamp_min(0), ties.counts[rank])
    is_early = (before + ties.places).amin(0) < prefix.ties
    has_target = (z_t > prefix.threshold) | ((z_t == prefix.threshold) & is_early)
    last_tie = _column_of_tie(ties.candidates, prefix.threshold, own)
    return KeptSet(normaliser, prefix.threshold, last_tie, z_t, has_target)


def is_kept(
    block: Float[Tensor, "n v"], threshold: Float[Tensor, " n"], last_tie: Int[Tensor, " n"]
) -> Bool[Tensor, "n v"]:
    """The kept ones of this rank's columns."""
    threshold, last_tie = threshold.unsqueeze(-1), last_tie.unsqueeze(-1)
    columns = torch.arange(block.shape[-1], dtype=last_tie.dtype, device=block.device)
    return (block > threshold) | ((block == threshold) & (columns <= last_tie))


def _column_of_tie(
    candidates: Candidates, threshold: Float[Tensor, " n"], count: Float[Tensor, " n"]
) -> Int[Tensor, " n"]:
    """Column of the count-th logit that equals the threshold, -1 where the count is 0."""
    last = torch.full(threshold.shape, -1, dtype=torch.int32, device=threshold.device)
    wanted = torch.where(count > 0, threshold, math.nan)  # nothing equals NaN: no list for rows without a kept tie
    for part, found in candidates.between(wanted, wanted):
        is_tie = found.logits == wanted[part][found.rows]
        is_last = is_tie & (ordinals(is_tie, found.rows, len(count[part])) == count[part][found.rows] - 1)
        columns = torch.where(is_last, found.columns, -1).to(last.dtype)
        last[part] = last[part].scatter_reduce(0, found.rows.long(), columns, "amax")
    return last
