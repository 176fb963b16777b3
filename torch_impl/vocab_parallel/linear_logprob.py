"""Log-probability of the target token, from hidden states and a rank's rows of the output weight.

Rank r of tp has rows [vocab_start_index, vocab_end_index) of the weight. It has all positions of the hidden states
(replicated) or its block of positions (sequence-parallel); their length tells which. Logits are computed one chunk of
positions at a time; the logits of a short sequence are computed at once and saved. Matrix products run in the input
dtype, the softmax in float32 or wider. Rows of logits follow the hidden states, position by position.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import no_autocast
from torch_impl.collectives.plain import all_gather_concat, all_reduce_sum, reduce_scatter_sum
from torch_impl.contract import Group, Positive, Rejected, Sharded, ShardedIds, ShardedInt, contract, dtype_name
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.fused_logprob import (
    NOTHING_SAVED,
    EntropyCotangent,
    id_cotangents,
)
from torch_impl.vocab_parallel.linear_chunks import (
    RowGradients,
    all_logits,
    chunk_positions,
    chunk_statistics,
    fit_beside,
    gradients,
)
from torch_impl.vocab_parallel.next_token import apart, next_ids
from torch_impl.vocab_parallel.packed import PackedSlots, offsets_on_host, packed_slots, why_not_offsets
from torch_impl.vocab_parallel.sequence_gather import GatherOverCp, cp_shard, rank_and_size, why_not_over_cp
from torch_impl.vocab_parallel.vocab_range import IGNORED_ID, ChunkSize, VocabEnd, VocabStart

HIDDEN, WEIGHT = "tensor_parallel_hidden_states", "output_weight_layer"
NO_WEIGHT = "output_weight_layer and output_weight are both None; pass the [v, d] weight"


class ChunkedDistributedHiddenStatesToLogprobs(torch.autograd.Function):
    """Log-probability of each target token from hidden states, for `.apply`; target already shifted and sharded.

    out[b, t] = log softmax(h[t, b] W^T / temperature)[target[b, t]]

    h are the `tensor_parallel_hidden_states`: l = s positions, the same on every tp rank, or l = s/tp positions if
    sequence-parallel. W is `output_weight_layer`.
    Matrix products run in the input dtype, even under autocast; d logits are rounded to it once, and d W is summed
    over the chunks in float32 or wider and rounded once. The result is float32 (float64 for float64 inputs).
    `chunk_size` counts positions of s and bounds the logits in memory. None chooses chunks of 256 MiB of logits (32
    MiB on a CPU), or saves all logits if they take no more memory than the weight and than 256 MiB.
    A target outside the vocabulary gives 0.0 and no gradient. The gradient of a frozen weight, or of frozen hidden
    states, is not computed.

    Cost:   forward 1 all_gather of 3 * b*s numbers of 4 bytes (float64: 8); backward 1 all_reduce of s*b*d numbers.
            Sequence-parallel: forward also 1 all_gather of the hidden states; backward 1 all_gather of them again, and
            1 reduce_scatter in place of the all_reduce. Saves hidden states and weight by reference and 12 bytes per
            token (20 for float64). One matrix product forward and three backward, two if the logits were saved.
    Errors: TypeError for a group that is not a ProcessGroup, ids that are not int32 or int64, tensors that are not
            floating; ValueError if hidden states and weight differ in d or dtype, hidden states and target in length
            or batch, or the range or chunk_size does not fit; RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        tensor_parallel_hidden_states: Sharded[Tensor, "s/tp b d", "s b d tp=I"],
        target: ShardedIds[Tensor, "b s"],
        output_weight_layer: Sharded[Tensor, "v/tp d"],
        vocab_start_index: VocabStart,
        vocab_end_index: VocabEnd,
        chunk_size: ChunkSize | None,
        tp_group: Group[ProcessGroup, "tp"],
        inference_only: bool = False,
        temperature: Positive = 1.0,
    ) -> Sharded[Tensor, "b s tp=I"]:
        hidden, weight, tp = tensor_parallel_hidden_states, output_weight_layer, tp_group.size()
        reason = _why_no_product(hidden, weight) or _why_not_positions(len(hidden), target.shape[1], 1, tp)
        if reason:
            raise Rejected(reason)
        is_sharded = len(hidden) != target.shape[1]
        return _forward(
            ctx,
            hidden,
            target,
            weight,
            (vocab_start_index, vocab_end_index),
            chunk_size,
            tp_group,
            inference_only,
            is_sharded,
            float(temperature),
        )

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = _backward(ctx, *grad_outputs)
        return d_hidden, None, d_weight, *(None,) * 6


@contract
def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Sharded[Tensor, "s/cp:LAYOUT b d tp=I", "s/cp:LAYOUT/tp b d"],
    output_weight_layer: Sharded[Tensor, "v/tp d cp=R"] | None,
    output_weight: Sharded[Tensor, "v/tp d cp=R"] | None,
    runtime_gather_output: bool | None,
    target: ShardedIds[Tensor, "b s"],
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    tp_group: Group[ProcessGroup, "tp"],
    inference_only: bool = False,
    cp_group: Group[ProcessGroup, "cp"] | None = None,
    chunk_size: ChunkSize | None = None,
    cu_seqlens_padded: ShardedInt[Tensor, "n"] | None = None,
    temperature: Positive = 1.0,
    with_entropy: bool = False,
) -> Sharded[Tensor, "b u tp=I cp=R"] | tuple[Sharded[Tensor, "b u tp=I cp=R"], Sharded[Tensor, "b u tp=I cp=R"]]:
    """Log-probability of each next token from hidden states; `target` replicated and unshifted.

    out[b, t] = log softmax(h[t, b] W^T / temperature)[target[b, t + 1]],   t < u = s - 1

    h are the `tensor_parallel_hidden_states`. Positions are sharded over cp in DualChunkSwap order; sequence-parallel
    hidden states have this tp rank's l = s/(cp tp) of them, replicated ones all l = s/cp.
    W is `output_weight_layer`, or `output_weight` if that is None (tied to the embedding). Logits are never gathered;
    `runtime_gather_output` is ignored. `cu_seqlens_padded` makes the s tokens a packed stream: its layout over cp is
    `packed`, the shift stays inside each sequence, and the last token of each sequence scores 0.0. `with_entropy`
    returns the pair (log-probability, sum p log p of its position) without another matrix product. Cotangents are
    summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp or use each score in the
    loss of one rank alone. d W is this cp rank's term of a sum over cp.

    Cost:   over tp as `ChunkedDistributedHiddenStatesToLogprobs`, with entropy 4 numbers for 3; over cp forward 1
            all_gather of b*s/cp numbers and backward 1 reduce_scatter of b*s, with entropy twice as many. Offsets cost
            one host read.
    Errors: as `ChunkedDistributedHiddenStatesToLogprobs`; ValueError if both weights are None or s cannot be sharded
            over cp; offsets as `from_parallel_logits_to_logprobs_packed_sequences`.
    """
    # 1. Checks that a contract cannot state: dtypes of hidden states and weight, lengths over cp and tp, offsets.
    hidden, s, (rank, cp) = tensor_parallel_hidden_states, target.shape[1], rank_and_size(cp_group)
    weight = output_weight if output_weight_layer is None else output_weight_layer
    if weight is None:
        raise Rejected(f"{NO_WEIGHT}")
    offsets = None if cu_seqlens_padded is None else offsets_on_host(cu_seqlens_padded, None)[0]
    reason = (
        _why_no_product(hidden, weight)
        or why_not_over_cp(s, cp)
        or _why_not_positions(len(hidden), s, cp, tp_group.size())
        or (None if offsets is None else why_not_offsets(offsets, None, cp, s, "target"))
    )
    if reason:
        raise Rejected(reason)
    # 2. The id after each position of this rank; in a packed stream, inside the same sequence.
    shifted, slots = _next_ids_of_rank(target.to(weight.device), offsets, rank, cp)
    # 3. Score this rank's positions, then gather over cp.
    vocab_range, is_sharded = (vocab_start_index, vocab_end_index), len(hidden) != s // cp
    scores = _HiddenStatesToLogprobs.apply(
        hidden,
        shifted,
        weight,
        vocab_range,
        chunk_size,
        tp_group,
        inference_only,
        is_sharded,
        float(temperature),
        with_entropy,
    )
    if slots is not None:
        return slots.spread_apart(scores, slots.position, max(s - 1, 0), cp_group, with_entropy)
    if cp_group is not None:
        scores = GatherOverCp.apply(scores, cp_group, 1)
    return apart(scores[:, : max(s - 1, 0)], with_entropy)


def _next_ids_of_rank(
    ids: Int[Tensor, "b s"], offsets: Int64[Tensor, " n"] | None, rank: int, cp: int
) -> tuple[Int[Tensor, "b _"], PackedSlots | None]:
    """(the id after each position of this rank, the slots of packed sequences or None)."""
    s = ids.shape[1]
    if offsets is None:
        return cp_shard(next_ids(ids, s), rank, cp), None
    slots = packed_slots(offsets, None, cp, ids.device)
    return F.pad(slots.next_ids(ids, rank), (0, s // cp - len(slots.sequence)), value=IGNORED_ID), slots


def _why_no_product(hidden: Tensor, weight: Tensor) -> str | None:
    """Why hidden states and weight cannot be multiplied, or None."""
    if weight.dtype != hidden.dtype:
        return f"{WEIGHT} is {dtype_name(weight)} but hidden states are {dtype_name(hidden)}"
    return None


def _why_not_positions(local: int, s: int, cp: int, tp: int) -> str | None:
    """Why `local` positions are neither this cp rank's share of s nor one tp rank's block of that share, or None."""
    share = s // cp
    if local == share or (share % tp == 0 and local == share // tp):
        return None
    choice = (
        f"{share} (replicated) or {share // tp} (sequence-parallel)"
        if share % tp == 0
        else f"{share} (replicated); {share} is not a multiple of tp={tp}, so they cannot be sequence-parallel"
    )
    return f"{HIDDEN} has {local} positions; with s={s}, cp={cp}, tp={tp} it must have {choice}"


class _HiddenStatesToLogprobs(torch.autograd.Function):
    """`ChunkedDistributedHiddenStatesToLogprobs` for validated arguments."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        return _forward(ctx, hidden, target, weight, *settings)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = _backward(ctx, *grad_outputs)
        return d_hidden, None, d_weight, *(None,) * 7


def _forward(
    ctx: Any,
    hidden: Float[Tensor, "l b d"],
    target: Int[Tensor, "b s"],
    weight: Float[Tensor, "v d"],
    vocab_range: tuple[int, int],
    chunk_size: int | None,
    group: ProcessGroup,
    inference_only: bool,
    is_sharded: bool,
    temperature: float,
    with_entropy: bool = False,
) -> Float[Tensor, "b s *two"]:
    """The log-probabilities, with entropy both in a last dim of 2. `is_sharded`: sequence-parallel hidden states."""
    ctx.temperature, ctx.with_entropy = temperature, with_entropy
    ctx.group, ctx.chunk_size, ctx.inference_only, ctx.is_sharded = group, chunk_size, inference_only, is_sharded
    # 1. Statistics of this rank's logits, chunk by chunk.
    # Rows are [s, b] like the hidden states, and ids are [b, s]: transpose the ids here, and the result back below.
    column = statistics.local_column(target.T.reshape(-1, 1), *vocab_range)
    with no_autocast(hidden.device):
        states = _all_positions(ctx, hidden)
        saves_logits = any(ctx.needs_input_grad) and not inference_only and chunk_size is None
        ctx.is_one_chunk = ctx.has_logits = saves_logits and fit_beside(weight, states)
        logits = all_logits(states, weight) if ctx.has_logits else None
        positions = len(states) if ctx.is_one_chunk else chunk_positions(states, len(weight), chunk_size)
        local = chunk_statistics(states, weight, logits, column, positions, temperature, with_entropy)
    # 2. Statistics of all ranks, and their merged values.
    row_max_r, row_sum_m1_r, z_r, *shifted_mean_r = statistics.gather_statistics(local, group).unbind(1)
    normaliser = statistics.global_normaliser(row_max_r, row_sum_m1_r, temperature)
    z_t, shifted_mean = statistics.global_target_logit(z_r), None
    # Mark ids that no rank has, so that backward skips their rows.
    column = torch.where((z_t == math.inf).unsqueeze(-1), statistics.OUT_OF_VOCABULARY, column)
    logprob = statistics.logprob_of(z_t, normaliser, temperature).view(target.T.shape).T.contiguous()
    if with_entropy:
        shifted_mean = statistics.global_shifted_mean(
            row_max_r, row_sum_m1_r, shifted_mean_r[0], normaliser, temperature
        )
        entropy = (shifted_mean - normaliser.log_row_sum).view(target.T.shape).T
        logprob = torch.stack([logprob, entropy], -1)
    if not inference_only:
        ctx.save_for_backward(hidden, weight, logits, column, *normaliser, shifted_mean)
    return logprob


def _backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(d hidden, d weight), None for a frozen tensor. Logits that were not saved are recomputed in the same chunks.

    Saved logits are overwritten by their gradient; a second backward through the same graph recomputes them.
    """
    if ctx.inference_only:
        raise RuntimeError(NOTHING_SAVED)
    hidden, weight, logits, column, *normaliser, shifted_mean = ctx.saved_tensors
    # Writing through `.data` does not count as a change of the saved tensor; autograd would reject a second backward.
    logits = logits.data if ctx.has_logits else None
    ctx.has_logits = False
    g, entropy = grad_outputs[0], None
    if ctx.with_entropy:
        g, g_entropy = g.unbind(-1)
        entropy = EntropyCotangent(shifted_mean, g_entropy.T.reshape(-1))
    of_hidden, _, of_weight, *_ = ctx.needs_input_grad
    with no_autocast(hidden.device):
        states = _all_positions(ctx, hidden)
        positions = len(states) if ctx.is_one_chunk else chunk_positions(states, len(weight), ctx.chunk_size)
        of_rows = RowGradients(
            id_cotangents(column, g.T.reshape(-1, 1)), entropy, statistics.Normaliser(*normaliser), ctx.temperature
        )
        d_hidden, d_weight = gradients(states, weight, logits, of_rows, positions, (of_hidden, of_weight))
    if d_hidden is not None:  # each rank's term covers its own columns of the logits
        lengths = [len(hidden)] * ctx.group.size()
        if ctx.is_sharded:
            d_hidden = reduce_scatter_sum(d_hidden, ctx.group, 0, lengths)
        else:
            d_hidden = all_reduce_sum(d_hidden, ctx.group)
    return d_hidden, d_weight


def _all_positions(ctx: Any, hidden: Float[Tensor, "l b d"]) -> Float[Tensor, "s b d"]:
    """Hidden states of all positions: "s/tp b d" -> "s b d" if they are sequence-parallel."""
    return all_gather_concat(hidden, ctx.group, 0, [len(hidden)] * ctx.group.size()) if ctx.is_sharded else hidden
