"""Log-probability of a token under the distribution that a sampler drew it from: temperature, top-k, top-p, min-p.

Each rank has its columns of every token's logits, and every target. Logits stay on their rank, and no rank sees a full
row. Sort a row by descending logit, and equal logits by ascending id: the tokens that top-k and top-p keep are a
prefix. Three numbers describe it: the last logit that is kept, how many tokens with that logit are kept, and the sum
over the kept tokens (`filter_bounds`). All ranks agree on the three, and each derives from them which of its columns
are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.contract import (
    Group,
    Number,
    Positive,
    Sharded,
    ShardedIds,
    Sizes,
    TypeProblem,
    contract,
    sentence_about,
)
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.contract.kinds import too_large
from torch_impl.vocab_parallel import fused_logprob, statistics
from torch_impl.vocab_parallel.filter_bounds import Candidates, Limits, keep_first, limits_of, ordinals
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions, block_function, id_cotangents, write_gradient
from torch_impl.vocab_parallel.statistics import Normaliser, row_blocks, rows_per_block
from torch_impl.vocab_parallel.topk_by_lists import topk_by_lists
from torch_impl.vocab_parallel.topk_by_radix import topk_by_radix
from torch_impl.vocab_parallel.vocab_range import ChunkSize, VocabEnd, VocabStart, stated_or_counted_range

LONGEST_LIST = 1024


@dataclass(frozen=True)
class _TopKKind:
    """An integer; below 1 the filter is off."""

    def problem(self, value: Any) -> str | None:
        if isinstance(value, Integral) and not isinstance(value, bool):
            return too_large(value)
        return TypeProblem(f"={value!r} must be an integer (None turns it off)")


@dataclass(frozen=True)
class _ShareKind:
    """A number in [0, 1]; at `off` the filter is off."""

    off: float

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, Real) or isinstance(value, bool):
            return TypeProblem(f"={value!r} must be a number ({self.off} turns it off)")
        return None if 0 <= float(value) <= 1 else f"={value} must lie in [0, 1] ({self.off} turns it off)"


@dataclass(frozen=True)
class _SamplingKind:
    """Any object with the three attributes of `SamplingParams`."""

    def problem_beside(self, name: str, value: Any, sizes: Sizes) -> str | None:
        if isinstance(value, TrainingSamplingParams):  # validated by its constructor
            return None
        if not isinstance(value, SamplingParams):
            return TypeProblem(f"{name} needs the attributes top_k, top_p and temperature")
        kinds = {"top_k": _TopKKind(), "top_p": _ShareKind(1.0), "min_p": _ShareKind(0.0)}
        for attribute, kind in kinds.items():
            setting = getattr(value, attribute, None)
            if setting is not None and (problem := kind.problem(setting)) is not None:
                return sentence_about(attribute, problem)
        return sentence_about("temperature", Number(0, above=True).problem(value.temperature))


@runtime_checkable
class SamplingParams(Protocol):
    """The type of `sampling_params`: any object with these three attributes, and optionally `min_p`."""

    @property
    def top_k(self) -> int | None: ...

    @property
    def top_p(self) -> float | None: ...

    @property
    def temperature(self) -> float: ...


def min_p_of(params: SamplingParams) -> float | None:
    """The object's min_p, or None without that attribute."""
    return getattr(params, "min_p", None)


TopK = Annotated[int, _TopKKind()]
TopP = Annotated[float, _ShareKind(1.0)]
MinP = Annotated[float, _ShareKind(0.0)]
Sampling = Annotated[SamplingParams, _SamplingKind()]


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Top-k, top-p, temperature and min-p of a sampler.

    The temperature applies first, then min-p and top-k, then top-p to the remaining tokens. min-p keeps a token if its
    probability is at least `min_p` times the largest. A setting is off at `top_k` None or below 1, `top_p` None or 1.0,
    `temperature` 1.0, and `min_p` None or 0.0. Any object with the first three attributes may be passed as
    `sampling_params`; without an attribute `min_p`, min-p is off.

    Errors: ValueError if top_p or min_p is outside [0, 1] or temperature is not positive; TypeError if top_k is not an
            integer.
    """

    top_k: int | None = None
    top_p: float | None = 1.0
    temperature: float = 1.0
    min_p: float | None = None

    def __post_init__(self) -> None:
        _of_training(self.top_k, self.top_p, self.temperature, self.min_p)


@contract("vocab_parallel.TrainingSamplingParams")
def _of_training(top_k: TopK | None, top_p: TopP | None, temperature: Positive, min_p: MinP | None) -> None:
    """Validate the constructor's arguments by its contract."""


class SamplingFilter(NamedTuple):
    """The kept tokens of each row, as one rank needs them: normaliser, last kept column, and the target."""

    normaliser: statistics.Normaliser
    threshold: Float[Tensor, " n"]
    last_tie: Int[Tensor, " n"]  # this rank's last kept column with a logit equal to the threshold
    z_t: Float[Tensor, " n"]  # the target's logit; +inf outside the vocabulary
    has_target: Bool[Tensor, " n"]  # whether the target is kept; the same on every rank


def sampling_filter(
    logits: Float[Tensor, "*a v"],
    column: Int[Tensor, "n 1"],
    options: LogprobOptions,
    limits: Limits,
) -> SamplingFilter:
    """The kept tokens of each row.

    Collectives: with top_k <= 1024 1 all_gather. Otherwise 1 all_gather and R all_reduce for top_k, 3 all_gather and R
    all_reduce for top_p (1 all_gather is shared with top_k), 1 all_gather for min_p; R is the bytes of a logit.
    """
    # 1. The bounds, the same on every rank: a short top-k fits in one message, a long top-k is selected bit by bit.
    if limits.top_k is not None and limits.top_k <= LONGEST_LIST:
        bounds, ties, z_t = topk_by_lists(logits, column, options, limits)
    else:
        bounds, ties, z_t = topk_by_radix(logits, column, options, limits)
    normaliser = statistics.Normaliser(bounds.row_max, bounds.row_sum_m1.log1p())
    # 2. Tokens at the threshold are kept in rank order, and on a rank from the lowest column on.
    if ties is None:  # all of them are kept
        last_tie = torch.full_like(column.squeeze(-1), logits.shape[-1])
        return SamplingFilter(normaliser, bounds.threshold, last_tie, z_t, z_t >= bounds.threshold)
    before = ties.counts.cumsum(0) - ties.counts
    rank = 0 if options.group is None else options.group.rank()
    count = torch.minimum((bounds.ties - before[rank]).clamp_min(0), ties.counts[rank])
    # 3. Whether the target is kept. `before_target` is +inf except on the target's rank, which the minimum selects.
    is_early = (before + ties.before_target).amin(0) < bounds.ties
    has_target = (z_t > bounds.threshold) | ((z_t == bounds.threshold) & is_early)
    last_tie = _column_of_tie(ties.candidates, bounds.threshold, count)
    return SamplingFilter(normaliser, bounds.threshold, last_tie, z_t, has_target)


def _column_of_tie(
    candidates: Candidates, threshold: Float[Tensor, " n"], count: Float[Tensor, " n"]
) -> Int[Tensor, " n"]:
    """Column of the count-th logit that equals the threshold; -1 if the count is 0."""
    last = torch.full(threshold.shape, -1, dtype=torch.int32, device=threshold.device)
    tie_logit = torch.where(count > 0, threshold, math.nan)  # no logit equals NaN, so a row without a kept tie is empty
    for row_slice, entries in candidates.between(tie_logit, tie_logit):
        is_tie = entries.logits == tie_logit[row_slice][entries.rows]
        is_last = is_tie & (ordinals(is_tie, entries.rows, len(count[row_slice])) == count[row_slice][entries.rows] - 1)
        columns = torch.where(is_last, entries.columns, -1).to(last.dtype)
        last[row_slice] = last[row_slice].scatter_reduce(0, entries.rows.long(), columns, "amax")
    return last


def forward(
    ctx: Any, logits: Float[Tensor, "*a v"], target: Int[Tensor, "*a"], options: LogprobOptions, limits: Limits
) -> Float[Tensor, "*a"]:
    """log p[t] among the kept tokens, for the forward of an autograd Function; without limits the unfiltered core."""
    ctx.is_filtered = not limits.are_off
    if limits.are_off:
        return fused_logprob.forward(ctx, logits, target, options)[0]
    # 1. The score as if the target were kept.
    column = statistics.local_column(target.reshape(-1, 1), options.vocab_start, options.vocab_end)
    filtered = sampling_filter(logits, column, options, limits)
    score = statistics.logprob_of(filtered.z_t, filtered.normaliser, options.temperature)
    # 2. -inf if the target is filtered. Added, not filled in, so that a NaN row stays NaN.
    is_ignored = filtered.z_t == math.inf
    score = score + torch.where(filtered.has_target | is_ignored, 0.0, -math.inf)
    # 3. In backward a filtered target is treated like a target on another rank: its row is -p, without 1[v=t].
    ctx.options = options
    if not options.inference_only:
        missing = torch.where(is_ignored, statistics.OUT_OF_VOCABULARY, statistics.ON_ANOTHER_RANK).to(column.dtype)
        column = torch.where(filtered.has_target & ~is_ignored, column.squeeze(-1), missing)
        ctx.save_for_backward(logits, *filtered.normaliser, column, filtered.threshold, filtered.last_tie)
    return score.view(target.shape)


def backward(ctx: Any, cotangent: Tensor) -> Float[Tensor, "*a v"]:
    """The gradient of the logits, in their dtype: as in `fused_logprob`, with filtered logits masked."""
    options: LogprobOptions = ctx.options
    if options.inference_only or not ctx.is_filtered:
        return fused_logprob.backward(ctx, cotangent)
    logits, row_max, log_row_sum, column, threshold, last_tie = ctx.saved_tensors
    gradient = large_tensors.empty((len(column), logits.shape[-1]), logits.dtype, logits.device)
    at_ids = id_cotangents(column.unsqueeze(-1), cotangent.reshape(-1, 1))
    write = block_function(write_gradient, options, logits)
    for row_slice, block in row_blocks(logits.detach(), rows_per_block(logits, options.chunk_size)):
        # Recompute which tokens are kept: a saved mask would be as large as the logits.
        kept = keep_first(block, threshold[row_slice], last_tie[row_slice])
        normaliser = Normaliser(row_max[row_slice], log_row_sum[row_slice])
        write(gradient[row_slice], kept, normaliser, at_ids.rows(row_slice), None, options.temperature, True)
    return gradient.view(logits.shape)


class DistributedLogprobWithSampling(torch.autograd.Function):
    """Log-probability of each target among the tokens that a sampler keeps, for `.apply`; target already shifted.

    1. y = z / temperature, z the `vocab_parallel_logits`.
    2. top-k keeps z >= the k-th largest, with all its ties; min-p keeps a token if its probability is at least min_p
       times the largest. Off: top_k None or below 1, min_p None or 0.
    3. top-p sorts the remaining tokens (z descending, id ascending) and keeps a token if the mass before it is below
       top_p: the smallest prefix that reaches top_p, at least one token. Off: top_p None or 1.0.
    4. out = y[t] - log sum_kept exp(y_v); -inf if t is filtered, 0.0 outside the vocabulary.

    d z = g / temperature (1[v=t] - p_kept) on kept columns, 0 elsewhere

    The choice of kept tokens is a constant. The term 1[v=t] is absent for a filtered target; the row of a target
    outside the vocabulary is zero. With all filters off this is `DistributedLogprob`. Any strides; results and
    gradients have the dtypes of `vocab_parallel_logprob`. Columns past the range count in the softmax and are never a
    target. Without a range, ids are counted in rank order. Every tp rank passes the same cotangent.

    Cost:   forward with top_k <= 1024: 1 all_gather of top_k + 2 numbers per token (one more with top_p). Otherwise, in
            R = 2, 4 or 8 rounds for logits of 2, 4 or 8 bytes, R all_reduce of 256 numbers per token for top_k and
            R more for top_p, and 1 all_gather of 3 numbers per token; top_p adds 1 all_gather of 2 numbers per token
            and 1 all_gather of one number per token and one for the call; min_p adds 1 all_gather of one number per
            token. Without a range, 1 all_gather of one int64. Backward none. Saves the logits by reference and 5
            numbers per token.
    Errors: TypeError if tp_group is not a ProcessGroup, ids are not int32 or int64, logits not floating, top_k not an
            integer; ValueError if target and logits disagree in shape, the range does not fit the shard or lacks
            an end, or top_p or temperature is out of range; RuntimeError in backward after inference_only=True.
    Source: arXiv 1904.09751 (top-p), arXiv 1805.04833 (top-k).
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        target: ShardedIds[Tensor, "..."],
        tp_group: Group[ProcessGroup, "tp"],
        top_k: TopK | None,
        top_p: TopP | None,
        inference_only: bool = False,
        temperature: Positive = 1.0,
        vocab_start_index: VocabStart | None = None,
        vocab_end_index: VocabEnd | None = None,
        min_p: MinP | None = None,
    ) -> Sharded[Tensor, "... tp=I"]:
        start, end = stated_or_counted_range(
            vocab_parallel_logits,
            tp_group,
            vocab_start_index,
            vocab_end_index,
        )
        options = LogprobOptions(tp_group, start, end, float(temperature), inference_only=inference_only)
        return forward(ctx, vocab_parallel_logits, target, options, limits_of(top_k, top_p, min_p))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx, *grad_outputs), *(None,) * 9


class ChunkedDistributedLogprobWithSampling(torch.autograd.Function):
    """`DistributedLogprobWithSampling` in blocks of `b * chunk_size` rows (None: automatic), for `.apply`.

    The chunk size is local: it bounds the working set for this rank's `vocab_parallel_logits`, may differ from rank to
    rank, and changes neither values nor collectives. All else is as in `DistributedLogprobWithSampling`.

    Cost:   as `DistributedLogprobWithSampling`.
    Errors: as `DistributedLogprobWithSampling`; ValueError if chunk_size is below 1.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        target: ShardedIds[Tensor, "..."],
        tp_group: Group[ProcessGroup, "tp"],
        top_k: TopK | None,
        top_p: TopP | None,
        chunk_size: ChunkSize | None,
        inference_only: bool = False,
        temperature: Positive = 1.0,
        vocab_start_index: VocabStart | None = None,
        vocab_end_index: VocabEnd | None = None,
        min_p: MinP | None = None,
    ) -> Sharded[Tensor, "... tp=I"]:
        start, end = stated_or_counted_range(
            vocab_parallel_logits,
            tp_group,
            vocab_start_index,
            vocab_end_index,
        )
        options = LogprobOptions(
            tp_group, start, end, float(temperature), chunk_size=chunk_size, inference_only=inference_only
        )
        return forward(ctx, vocab_parallel_logits, target, options, limits_of(top_k, top_p, min_p))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return backward(ctx, *grad_outputs), *(None,) * 10
