"""Short top-k, and top-p within it, from each rank's list of its k largest logits.

The lists contain the k largest logits of all ranks, so one exchange is enough for the k-th largest, the number of
logits equal to it, and the sum over the kept tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.filter_bounds import (
    Candidates,
    FilterBounds,
    Limits,
    Ties,
    min_p_floor,
    room_for,
    ties_within,
    weight_of,
)
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions
from torch_impl.vocab_parallel.statistics import row_blocks, rows_per_block

# Bytes of lists that are merged at a time; sorting takes several copies of them.
MERGED_BYTES = 1 << 22


class Lists(NamedTuple):
    """The messages of all ranks about their columns."""

    values: Float[Tensor, "r k n"]  # the rank's k largest logits, descending, padded with -inf
    last_count: Float[Tensor, "r n"]  # number of the rank's logits that equal the last of its list
    z_t: Float[Tensor, "r n"]  # the target's logit on its rank, else +inf
    ties_before: Float[Tensor, "r n"] | None  # number of equal logits before the target on its rank, else +inf


def topk_by_lists(
    logits: Float[Tensor, "*a v"], column: Int[Tensor, "n 1"], options: LogprobOptions, limits: Limits
) -> tuple[FilterBounds, Ties | None, Float[Tensor, " n"]]:
    """(bounds, ties or None if all ties are kept, the target's logit).

    One all_gather of k + 2 numbers per row, with top-p k + 3.
    """
    # 1. This rank's list, ties and target, one block of rows at a time, and one exchange.
    k, n = limits.top_k or 0, len(column)
    message = torch.empty(k + 2 + (limits.top_p is not None), n, dtype=accumulator(logits.dtype), device=logits.device)
    for row_slice, block in row_blocks(logits, rows_per_block(logits, options.chunk_size)):
        message[:, row_slice] = _rank_lists(block, column[row_slice], k, limits.top_p is not None)
    messages = statistics.gather_statistics(message, options.group)
    lists = Lists(messages[:, :k], messages[:, k], messages[:, k + 1], *messages[:, k + 2 :].unbind(1) or (None,))
    # 2. Every rank computes the same bounds by the same arithmetic.
    bounds, counts = _bounds(lists, options.temperature, limits)
    ties = (
        None if lists.ties_before is None else Ties(counts, lists.ties_before, Candidates(logits, options.chunk_size))
    )
    return bounds, ties, statistics.global_target_logit(lists.z_t)


def _rank_lists(
    block: Float[Tensor, "n v"], column: Int[Tensor, "n 1"], k: int, with_ties_before: bool
) -> Float[Tensor, "f n"]:
    """This rank's message for one row block."""
    dtype, width = accumulator(block.dtype), block.shape[-1]
    values = F.pad(block.topk(min(k, width)).values.to(dtype), (0, max(k - width, 0)), value=-math.inf)
    rows = [values.mT, (block == values[:, -1:]).sum(-1).to(dtype).unsqueeze(0)]
    z_t = torch.full_like(values[:, :1], math.inf)
    if width:
        z_t = block.gather(-1, statistics.index_of(column)).to(dtype).masked_fill_(column < 0, math.inf)
    rows.append(z_t.mT)
    if with_ties_before:
        columns = torch.arange(width, dtype=column.dtype, device=column.device)
        before = ((block == z_t) & (columns < column)).sum(-1, keepdim=True)
        rows.append(torch.where(column >= 0, before.to(dtype), math.inf).mT)
    return torch.cat(rows)


def _bounds(lists: Lists, temperature: float, limits: Limits) -> tuple[FilterBounds, Float[Tensor, "r n"]]:
    """(bounds, number of logits on each rank that equal the threshold), from all ranks' lists."""
    world, k, n = lists.values.shape
    columns = max(1, MERGED_BYTES // (world * k * lists.values.itemsize))
    parts = []
    for start in range(0, max(n, 1), columns):
        row_slice = slice(start, start + columns)
        values, last_count = lists.values[..., row_slice], lists.last_count[:, row_slice]
        k_largest = values.permute(2, 0, 1).flatten(1).topk(k).values
        if limits.min_p is not None:
            k_largest = _likely(k_largest, temperature, limits.min_p)
        ties = _equal_to(k_largest[:, -1], values, last_count).sum(0)
        bounds = _bounds_of_rows(k_largest, ties, temperature, limits.top_p)
        parts.append((*bounds, _equal_to(bounds.threshold, values, last_count)))
    *fields, counts = (torch.cat(blocks, dim=-1) for blocks in zip(*parts, strict=True))
    return FilterBounds(*fields), counts


def _likely(k_largest: Float[Tensor, "n k"], temperature: float, min_p: float) -> Float[Tensor, "n k"]:
    """The k largest, with each logit that min-p drops replaced by the smallest logit that min-p keeps."""
    is_likely = k_largest >= min_p_floor(k_largest[:, :1], temperature, min_p)
    is_likely[:, 0] = True  # even in a NaN row
    return torch.where(is_likely, k_largest, k_largest.gather(-1, is_likely.sum(-1, keepdim=True) - 1))


def _equal_to(
    z: Float[Tensor, " n"], values: Float[Tensor, "r k n"], last_count: Float[Tensor, "r n"]
) -> Float[Tensor, "r n"]:
    """The number of each rank's logits that equal z, where z is at least the k-th largest of all ranks."""
    in_list = (values == z).sum(1).to(last_count.dtype)
    return torch.where(values[:, -1] == z, last_count, in_list)


def _bounds_of_rows(
    k_largest: Float[Tensor, "n k"], ties: Float[Tensor, " n"], temperature: float, top_p: float | None
) -> FilterBounds:
    """The bounds of the kept tokens, from the k largest logits and the number `ties` of logits equal to the k-th."""
    # 1. Weights of the tokens above the k-th largest. All weights add up to 1 + R: the first token is the 1, left out.
    row_max, kth = k_largest[:, :1], k_largest[:, -1:]
    is_above = k_largest > kth
    is_above[:, 0] = False
    weights = torch.where(is_above, weight_of(k_largest, row_max, temperature), 0.0)
    upto = weights.cumsum(-1)
    # 2. R is over the other tokens that top-k keeps: these, and the ties of the k-th largest without the first token.
    weight, first_is_tie = weight_of(kth, row_max, temperature), kth == row_max
    other_ties = ties.unsqueeze(-1) - first_is_tie.to(ties.dtype)
    row_sum_m1 = upto[:, -1:] + other_ties * torch.where(other_ties > 0, weight, 0.0)
    # A row with an infinite maximum has no softmax.
    row_sum_m1 = torch.where(row_max.isfinite(), row_sum_m1, math.nan)
    if top_p is None:
        return FilterBounds(*(x.squeeze(-1) for x in (row_max, row_sum_m1, kth, ties.unsqueeze(-1))))
    # 3. Top-p keeps tokens above the k-th largest, then ties, as long as the mass before a token is below the limit.
    room = room_for(row_sum_m1, top_p)
    is_kept = is_above & (upto - weights < room)
    more = ties_within(room - upto[:, -1:], weight, other_ties)
    is_kept[:, 0] = True
    threshold = torch.where(more > 0, kth, k_largest.gather(-1, is_kept.sum(-1, keepdim=True) - 1))
    count = (is_kept & (k_largest == threshold)).sum(-1, keepdim=True) + more
    row_sum_m1_kept = torch.where(is_kept & is_above, weights, 0.0).sum(-1, keepdim=True) + more * weight
    row_sum_m1_kept = torch.where(row_sum_m1.isnan(), row_sum_m1, row_sum_m1_kept)
    return FilterBounds(*(x.squeeze(-1) for x in (row_max, row_sum_m1_kept, threshold, count)))
