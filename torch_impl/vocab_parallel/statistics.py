"""The core: what each rank knows of a softmax row from its own columns, and how the ranks' knowledge merges.

Every rank holds V_l columns of each row. It reads them once and keeps, per row and in float32 or wider,

    lse_r = log sum_v exp(z_v)      the local normaliser; -inf for an empty or fully masked shard
    z_t                             the target's logit if this rank owns the target, else +inf
    e_r   = sum_v p_v log p_v       over the local softmax; 0 for an empty shard

One all_gather brings the ranks' numbers together, and every rank merges them by the same arithmetic in the
same order, so that the results are equal to the bit.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import gathered

NOT_HERE = -1  # column of a target that this rank does not own
NOBODYS = -2  # column of a target that no rank owns


def local_column(target: Int[Tensor, " n"], start: int, end: int) -> Int[Tensor, " n"]:
    """Column of each target within this rank's ids [start, end), or NOT_HERE."""
    owned = (target >= start) & (target < end)
    return torch.where(owned, target - start, NOT_HERE).to(torch.int32)


def scaled(block: Float[Tensor, "n v"], temperature: float) -> Float[Tensor, "n v"]:
    """The logits over the temperature, in float32 or wider. May be the block itself: not to be written to."""
    z = block.to(accumulator(block.dtype))
    return z if temperature == 1.0 else z / temperature


def local_statistics(
    block: Float[Tensor, "n v"], column: Int[Tensor, " n"] | None, temperature: float, with_entropy: bool
) -> Float[Tensor, "f n"]:
    """Rows lse_r, then z_t if there is a column, then e_r if asked for."""
    if block.shape[-1] == 0:
        return _of_an_empty_shard(block, column, with_entropy)
    z = scaled(block, temperature)
    largest = z.amax(-1)
    shift = torch.where(largest.isfinite(), largest, 0.0)  # a row of -inf: keep -inf - shift from being NaN
    below = z - shift.unsqueeze(-1)
    weights = below.exp()
    total = weights.sum(-1)
    rows = [shift + total.log()]
    if column is not None:
        looked_up = z.gather(-1, column.clamp_min(0).long().unsqueeze(-1)).squeeze(-1)
        rows.append(torch.where(column >= 0, looked_up, math.inf))
    if with_entropy:
        moment = (weights * without_minus_infinity(below)).sum(-1) / total - total.log()
        rows.append(torch.where(total == 0, 0.0, moment))
    return torch.stack(rows)


def exchanged(statistics: Float[Tensor, "f n"], group: ProcessGroup) -> Float[Tensor, "r f n"]:
    """The statistics of every rank, in rank order. The one collective."""
    return gathered(statistics.unsqueeze(0), group, 0, [1] * group.size())


def merged_normaliser(lse_r: Float[Tensor, "r ..."]) -> Float[Tensor, "*a"]:
    """lse = logsumexp_r lse_r."""
    return torch.logsumexp(lse_r, 0)


def merged_target(z_t: Float[Tensor, "r ..."]) -> Float[Tensor, "*a"]:
    """The target's logit; +inf where nobody owns the target."""
    return z_t.amin(0)


def merged_entropy(
    lse_r: Float[Tensor, "r ..."], e_r: Float[Tensor, "r ..."], lse: Float[Tensor, "*a"]
) -> Float[Tensor, "*a"]:
    """sum_v p_v log p_v = sum_r w_r (e_r + lse_r - lse),  w_r = exp(lse_r - lse)."""
    share = (lse_r - lse).exp()
    return torch.where(share == 0, 0.0, share * (e_r + lse_r - lse)).sum(0)


def logprob_of(z_t: Float[Tensor, "*a"], lse: Float[Tensor, "*a"]) -> Float[Tensor, "*a"]:
    """z_t - lse; 0 where nobody owns the target; NaN where the row itself is NaN or +inf."""
    nobodys = torch.where(lse < math.inf, 0.0, math.nan)
    return torch.where(z_t < math.inf, z_t - lse, nobodys)


def without_minus_infinity(log_p: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """log p with a finite floor, so that 0 log 0 is 0."""
    return log_p.clamp_min(torch.finfo(log_p.dtype).min)


def _of_an_empty_shard(block: Tensor, column: Tensor | None, with_entropy: bool) -> Tensor:
    neutral = [-math.inf] + [math.inf] * (column is not None) + [0.0] * with_entropy
    rows = torch.tensor(neutral, dtype=accumulator(block.dtype), device=block.device)
    return rows.unsqueeze(-1).expand(-1, len(block))
