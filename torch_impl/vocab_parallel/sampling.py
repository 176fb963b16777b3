"""Log-probability of a token under the distribution that a sampler drew it from: temperature, top-k, top-p.

Rank r of the group holds its columns of the logits of every token, and every rank has every target. Rows never
change rank, and no rank sees a whole one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import joint
from torch_impl.vocab_parallel import statistics as st
from torch_impl.vocab_parallel.arguments import checked_tp_group
from torch_impl.vocab_parallel.asked import asked_of
from torch_impl.vocab_parallel.joint import Plan
from torch_impl.vocab_parallel.kept_set import is_kept, kept_set
from torch_impl.vocab_parallel.rows import block_rows, row_blocks
from torch_impl.vocab_parallel.sampling_params import Limits, checked_limits
from torch_impl.vocab_parallel.vocab_range import gathered_range


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
        return joint.forward(ctx, logits, target, plan)[0]
    joint.check(plan, logits, target)
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
        return joint.backward(ctx, cotangent)
    logits, largest, log_total, column, threshold, last_tie = ctx.saved_tensors
    gradient = logits.new_empty(len(column), logits.shape[-1])
    asked = asked_of(column.unsqueeze(-1), cotangent.reshape(-1, 1))
    write = joint.chosen(joint.write_gradient, plan, logits)
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
    joint.check(plan, logits, target)
    group = checked_tp_group(plan.function, plan.group_name, plan.group)
    start, end = gathered_range(logits.shape[-1], group, logits.device)
    return dataclasses.replace(plan, vocab_start=start, vocab_end=end)
