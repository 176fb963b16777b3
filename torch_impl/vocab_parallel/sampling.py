"""Log-probability of a token under the distribution that a sampler drew it from: temperature, top-k, top-p.

Rank r of the group holds its columns of the logits of every token, and every rank has every target. Rows never
change rank, and no rank sees a whole one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.arguments import check_temperature, checked_tp_group
from torch_impl.vocab_parallel.filter_bounds import Candidates, Limits, checked_limits, ordinals
from torch_impl.vocab_parallel.fused_logprob import Plan, asked_of
from torch_impl.vocab_parallel.statistics import block_rows, row_blocks
from torch_impl.vocab_parallel.topk_by_lists import cut_by_lists
from torch_impl.vocab_parallel.topk_by_radix import cut_by_selection
from torch_impl.vocab_parallel.vocab_range import gathered_range

LONGEST_LIST = 1024


@runtime_checkable
class SamplingParams(Protocol):
    """What may stand where `sampling_params` does: any object with these three attributes."""

    @property
    def top_k(self) -> int | None: ...

    @property
    def top_p(self) -> float | None: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Top-k, top-p and temperature, in the order: temperature, top-k on the logits, top-p on what is left.

    Off are `top_k` None or below 1, `top_p` None or 1.0, and `temperature` 1.0. Any object with these three
    attributes may stand where `sampling_params` does.

    Errors: ValueError if top_p lies outside [0, 1] or temperature is not positive; TypeError if top_k is no
            integer.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        function = "vocab_parallel.TrainingSamplingParams"
        checked_limits(function, self.top_k, self.top_p)
        check_temperature(function, self.temperature)


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


class DistributedLogprobWithSampling(torch.autograd.Function):
    """Log-probability of each target among the tokens that a sampler keeps, for `.apply`; target already shifted.

        vocab_parallel_logits  "b s v/tp"     target  "b s"     ->   "b s tp=I"

    1. y = z / temperature.
    2. top-k keeps z >= the k-th largest, with all its ties. Off: top_k None or below 1.
    3. top-p, of what is left, in the order (z descending, id ascending), keeps a token iff the mass before it is
       below top_p: the smallest prefix that reaches it, and one token at least. Off: top_p None or 1.0.
    4. out = y[t] - log sum_kept exp(y_v); -inf if t is filtered, 0.0 if nobody owns it.

    d z = g / temperature (1[v=t] - p_kept) on kept columns, 0 elsewhere: what is kept is a constant. A filtered
    target has no 1[v=t]; nobody's target has a zero row. With both limits off this is `DistributedLogprob`.

    Any leading dims and strides; results and gradients in the dtypes of `vocab_parallel_logprob`. Columns past
    the range take part and are never a target. Without a range ids are counted off in rank order.
    Every tp rank passes the same cotangent.

    Cost:   forward, with top_k <= 1024, 1 all_gather of top_k + 2 numbers per token (with top_p one more); else
            R = 2, 4 or 8 rounds for logits of 2, 4 or 8 bytes: R all_reduce of 256 numbers per token for top_k,
            as many for top_p, 1 all_gather of 3 numbers, and for top_p 1 of 2 numbers and 1 of one integer. One
            integer more without a range. Backward none. Saves the logits by reference and 5 numbers per token.
    Errors: TypeError if tp_group is None or no ProcessGroup, ids are not integers, logits not floating, top_k no
            integer; ValueError if target and logits disagree in shape, the range does not fit the shard or lacks
            an end, or top_p or temperature is out of range; RuntimeError in backward after inference_only=True.
    Source: arXiv 1904.09751 (top-p), arXiv 1805.04833 (top-k).
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Float[Tensor, "*a v"],
        target: Int[Tensor, "*a"],
        tp_group: ProcessGroup,
        top_k: int | None,
        top_p: float,
        inference_only: bool = False,
        temperature: float = 1.0,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
    ) -> Float[Tensor, "*a"]:
        function = "vocab_parallel.DistributedLogprobWithSampling"
        limits = checked_limits(function, top_k, top_p)
        plan = Plan(function, tp_group, temperature=temperature, inference_only=inference_only)
        plan = _with_range(plan, vocab_parallel_logits, target, vocab_start_index, vocab_end_index)
        return forward(ctx, vocab_parallel_logits, target, plan, limits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx, *grad_outputs), *(None,) * 8


class ChunkedDistributedLogprobWithSampling(torch.autograd.Function):
    """`DistributedLogprobWithSampling` in blocks of `chunk_size` positions of s (None: chosen here), for `.apply`.

        vocab_parallel_logits  "b s v/tp"     target  "b s"     ->   "b s tp=I"

    The chunk size is local: it bounds this rank's working set, may differ from rank to rank, and changes
    neither the values nor the collectives. All else is as in `DistributedLogprobWithSampling`.

    Cost:   that of `DistributedLogprobWithSampling`.
    Errors: those of `DistributedLogprobWithSampling`; ValueError if chunk_size is below 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Float[Tensor, "*a v"],
        target: Int[Tensor, "*a"],
        tp_group: ProcessGroup,
        top_k: int | None,
        top_p: float,
        chunk_size: int | None,
        inference_only: bool = False,
        temperature: float = 1.0,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
    ) -> Float[Tensor, "*a"]:
        function = "vocab_parallel.ChunkedDistributedLogprobWithSampling"
        limits = checked_limits(function, top_k, top_p)
        plan = Plan(function, tp_group, temperature=temperature, chunk_size=chunk_size, inference_only=inference_only)
        plan = _with_range(plan, vocab_parallel_logits, target, vocab_start_index, vocab_end_index)
        return forward(ctx, vocab_parallel_logits, target, plan, limits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx, *grad_outputs), *(None,) * 9


def forward(
    ctx: Any, logits: Float[Tensor, "*a v"], target: Int[Tensor, "*a"], plan: Plan, limits: Limits
) -> Float[Tensor, "*a"]:
    """log p[t] among the kept tokens, for the forward of an autograd Function; without limits the plain core."""
    ctx.is_filtered = not limits.are_off
    if limits.are_off:
        return fused_logprob.forward(ctx, logits, target, plan)[0]
    fused_logprob.check(plan, logits, target)
    column = st.local_column(target.reshape(-1, 1), plan.vocab_start, plan.vocab_end)
    kept = kept_set(logits, column, plan, limits)
    score = st.logprob_of(kept.z_t, kept.normaliser, plan.temperature)
    is_nobodys = kept.z_t == math.inf
    # Added, not selected: a row that is NaN stays NaN.
    score = score + torch.where(kept.has_target | is_nobodys, 0.0, -math.inf)
    ctx.plan = plan
    if not plan.inference_only:
        missed = torch.where(is_nobodys, st.NOBODYS, st.NOT_HERE).to(column.dtype)
        column = torch.where(kept.has_target & ~is_nobodys, column.squeeze(-1), missed)
        ctx.save_for_backward(logits, *kept.normaliser, column, kept.threshold, kept.last_tie)
    return score.view(target.shape)


def backward(ctx: Any, cotangent: Tensor) -> Float[Tensor, "*a v"]:
    """d logits of `forward`, in the logits' dtype: that of the core, on logits of which the filtered are masked."""
    plan: Plan = ctx.plan
    if plan.inference_only or not ctx.is_filtered:
        return fused_logprob.backward(ctx, cotangent)
    logits, largest, log_total, column, threshold, last_tie = ctx.saved_tensors
    gradient = logits.new_empty(len(column), logits.shape[-1])
    asked = asked_of(column.unsqueeze(-1), cotangent.reshape(-1, 1))
    write = fused_logprob.chosen(fused_logprob.write_gradient, plan, logits)
    for part, block in row_blocks(logits.detach(), block_rows(logits, plan.chunk_size)):
        kept = is_kept(block, threshold[part], last_tie[part])
        masked = block.masked_fill(~kept, -math.inf)
        rows = largest[part], log_total[part], None, None
        write(gradient[part], masked, plan.temperature, True, asked.rows(part), *rows)
    return gradient.view(logits.shape)


def _with_range(plan: Plan, logits: Tensor, target: Tensor, start: int | None, end: int | None) -> Plan:
    """The plan with this rank's ids, which are asked of all ranks if the caller does not know them."""
    if (start is None) != (end is None):
        raise ValueError(
            f"{plan.function}: vocab_start_index={start} but vocab_end_index={end}; pass both, or neither to count "
            "ids in rank order"
        )
    if start is not None and end is not None:
        return dataclasses.replace(plan, vocab_start=start, vocab_end=end)
    fused_logprob.check(plan, logits, target)
    group = checked_tp_group(plan.function, plan.group_name, plan.group)
    start, end = gathered_range(logits.shape[-1], group, logits.device)
    return dataclasses.replace(plan, vocab_start=start, vocab_end=end)
