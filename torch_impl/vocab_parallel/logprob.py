"""Log-probability of a target token, of k tokens, and the negative entropy, of logits sharded by vocabulary.

Rank r of the group has columns [vocab_start_index, vocab_end_index) of the logits of every token, and every
rank has every target. Shards are in rank order; they may differ in width and be empty. Columns of a shard beyond the
range, as where a vocabulary is padded, are in the softmax and never a target. `vocab_parallel_logprob` is the function
to call; the autograd Functions below it have the names and arguments of NeMo-RL. All of them call
`fused_logprob.forward` and `fused_logprob.backward`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl import kernels
from torch_impl.contract import Group, Positive, Rejected, Sharded, ShardedIds, contract
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel.fused_logprob import FusedLogprob, LogprobOptions
from torch_impl.vocab_parallel.vocab_range import ChunkSize, VocabEnd, VocabStart


@contract("vocab_parallel.logprob")
def vocab_parallel_logprob(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
    target: ShardedIds[Tensor, "..."],
    tp_group: Group[ProcessGroup, "tp"],
    *,
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    temperature: Positive = 1.0,
    with_entropy: bool = False,
    chunk_size: ChunkSize | None = None,
    inference_only: bool = False,
    inplace_gradient: bool = False,
    backend: Literal["auto", "eager", "compile", "triton"] = "auto",
) -> Sharded[Tensor, "... tp=I"] | tuple[Sharded[Tensor, "... tp=I"], Sharded[Tensor, "... tp=I"]]:
    """Log-probability of each target token; `with_entropy` the pair (logprob, sum p log p).

        vocab_parallel_logits  "b s v/tp"     target  "b s"     ->   "b s tp=I"  (with entropy two of them)

    log p[t] = y[t] - lse,   y = z / temperature,   lse = log sum_v exp(y_v)
    d z = (g_lp (1[v=t] - p) + g_h p (log p - h)) / temperature,   h = sum_v p_v log p_v, the negative entropy

    Any leading dims and strides. A target outside the vocabulary (-100, padding) gives 0.0 and, unless the
    entropy of its row has a cotangent, a zero gradient row, also where the logits are NaN.
    Columns of -inf are masked. Results are float32, for float64 logits float64; the gradient has the logits'
    dtype. Every tp rank passes the same cotangent.
    `chunk_size` bounds the working set, b * chunk_size consecutive rows at a time (None: chosen automatically), and may
    differ by rank; Triton, which needs no working set, takes all rows.
    `inplace_gradient` writes the gradient into the memory of the logits. If another operation saved them for its own
    backward, autograd raises an error there.
    `backend`: "auto" is Triton on CUDA and eager elsewhere; "eager", "compile" and "triton" force one.

    Cost:   forward 1 all_gather, 3 * b*s numbers of 4 bytes per rank (float64: 8; with entropy 4 * b*s); backward
            none. Saves the logits by reference and 12 bytes per token (with entropy 16), of float64 logits 20 (28).
    Errors: TypeError if tp_group is None or no ProcessGroup, ids are not int32 or int64, logits not floating;
            ValueError if target and logits disagree in shape, the range does not fit the shard, chunk_size,
            temperature or backend are out of range, or inplace_gradient=True for logits whose elements may share
            memory; ImportError if backend needs triton; RuntimeError in backward after inference_only=True.
    Source: arXiv 1805.02867 (online softmax), arXiv 1909.08053 (vocab-parallel cross entropy).
    """
    # Where Triton is requested and cannot run, fail on entry, before any collective.
    if backend == "triton":
        kernels.checked_backend(backend, "vocab_parallel_logits", vocab_parallel_logits)
    if inplace_gradient and may_share_memory(vocab_parallel_logits):
        raise Rejected(
            "inplace_gradient=True writes over vocab_parallel_logits, whose elements may share memory; "
            "pass vocab_parallel_logits.contiguous() or inplace_gradient=False"
        )
    options = LogprobOptions(
        group=tp_group,
        vocab_start=vocab_start_index,
        vocab_end=vocab_end_index,
        temperature=float(temperature),
        with_entropy=with_entropy,
        chunk_size=chunk_size,
        inference_only=inference_only,
        inplace_gradient=inplace_gradient,
        backend=backend,
    )
    outputs = FusedLogprob.apply(vocab_parallel_logits, target, options)
    return outputs if with_entropy else outputs[0]


def may_share_memory(logits: Tensor) -> bool:
    """Whether elements may share memory, as in an expanded tensor, so that a gradient cannot be written over them.

    False where each dim steps over all elements of the dims with smaller strides, as in every slice and permutation of
    a contiguous tensor.
    """
    if not logits.numel():
        return False
    last_offset = 0  # offset of the last element of the dims with smaller strides
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= last_offset:
            return True
        last_offset += stride * (size - 1)
    return False


class DistributedLogprob(torch.autograd.Function):
    """Log-probability of each target token, for `.apply`: target[i] is the token that the logits at i predict.

        vocab_parallel_logits  "b s v/tp"     target  "b s"     ->   "b s tp=I"

    out = z[target] / temperature - lse. Value, gradient and dtypes are those of `vocab_parallel_logprob`.

    Cost:   that of `vocab_parallel_logprob`.
    Errors: those of `vocab_parallel_logprob`.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        target: ShardedIds[Tensor, "..."],
        vocab_start_index: VocabStart,
        vocab_end_index: VocabEnd,
        group: Group[ProcessGroup, "tp"],
        inference_only: bool = False,
        temperature: Positive = 1.0,
    ) -> Sharded[Tensor, "... tp=I"]:
        options = LogprobOptions(
            group, vocab_start_index, vocab_end_index, float(temperature), inference_only=inference_only
        )
        return fused_logprob.forward(ctx, vocab_parallel_logits, target, options)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return fused_logprob.backward(ctx, *grad_outputs), None, None, None, None, None, None


class ChunkedDistributedLogprob(torch.autograd.Function):
    """`DistributedLogprob` in blocks of `b * chunk_size` rows (None: chosen automatically), for `.apply`.

        vocab_parallel_logits  "b s v/tp"     target  "b s"     ->   "b s tp=I"

    The chunk size is local: it bounds this rank's working set, may differ from rank to rank, and changes
    neither the values nor the collectives. All else is as in `DistributedLogprob`.

    Cost:   that of `DistributedLogprob`.
    Errors: those of `vocab_parallel_logprob`.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        target: ShardedIds[Tensor, "..."],
        vocab_start_index: VocabStart,
        vocab_end_index: VocabEnd,
        chunk_size: ChunkSize | None,
        tp_group: Group[ProcessGroup, "tp"],
        inference_only: bool = False,
        temperature: Positive = 1.0,
    ) -> Sharded[Tensor, "... tp=I"]:
        options = LogprobOptions(
            tp_group,
            vocab_start_index,
            vocab_end_index,
            float(temperature),
            chunk_size=chunk_size,
            inference_only=inference_only,
        )
        return fused_logprob.forward(ctx, vocab_parallel_logits, target, options)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return fused_logprob.backward(ctx, *grad_outputs), None, None, None, None, None, None, None


class ChunkedDistributedGatherLogprob(torch.autograd.Function):
    """Log-probabilities at k ids of each token, normalised over the full vocabulary, for `.apply`.

        vocab_parallel_logits  "b s v/tp"     global_indices  "b s k"     ->   "b s k tp=I"

    out[..., j] = z[idx_j] - lse,   lse = log sum_v exp(z_v)
    d z = -p sum_j g_j + sum_j g_j 1[v = idx_j],   over the slots whose id is in the vocabulary

    Any leading dims and strides. An id outside the vocabulary gives 0.0 and no gradient; duplicates add up; k may be 0.
    Columns of -inf are masked. Results are float32, for float64 logits float64; the gradient has the logits'
    dtype. Every tp rank passes the same cotangent.
    `chunk_size` bounds the working set, b * chunk_size consecutive rows at a time (None: chosen automatically), and may
    differ by rank; Triton, which needs no working set, takes all rows.

    Cost:   forward 1 all_gather, (k + 2) * b*s numbers of 4 bytes per rank (float64: 8); backward none. Saves
            the logits by reference and 8 + 4 k bytes per token, of float64 logits 16 + 4 k.
    Errors: TypeError if tp_group is None or no ProcessGroup, ids are not int32 or int64, logits not floating;
            ValueError if global_indices and logits disagree in shape, or the range or chunk_size do not fit;
            RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        global_indices: ShardedIds[Tensor, "... k"],
        vocab_start_index: VocabStart,
        vocab_end_index: VocabEnd,
        chunk_size: ChunkSize | None,
        tp_group: Group[ProcessGroup, "tp"],
        inference_only: bool = False,
    ) -> Sharded[Tensor, "... k tp=I"]:
        options = LogprobOptions(
            tp_group,
            vocab_start_index,
            vocab_end_index,
            chunk_size=chunk_size,
            inference_only=inference_only,
            has_id_dim=True,
        )
        return fused_logprob.forward(ctx, vocab_parallel_logits, global_indices, options)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return fused_logprob.backward(ctx, *grad_outputs), None, None, None, None, None, None


class ChunkedDistributedEntropy(torch.autograd.Function):
    """The negative entropy sum_v p_v log p_v, for `.apply`: the sign is that of a sum of log-probabilities.

        vocab_parallel_logits  "b s v/tp"     ->   "b s tp=I"

    h = sum_v p_v log p_v,   0 log 0 = 0,   -log V <= h <= 0
    d z = g p (log p - h)

    Any leading dims and strides, and any columns on any rank. Columns of -inf are masked. Results are float32, for
    float64 logits float64; the gradient has the logits' dtype. Every tp rank passes the same cotangent.
    `chunk_size` bounds the working set, b * chunk_size consecutive rows at a time (None: chosen automatically), and may
    differ by rank; Triton, which needs no working set, takes all rows.
    Together with a log-probability: `vocab_parallel_logprob(..., with_entropy=True)`, without another read.

    Cost:   forward 1 all_gather, 3 * b*s numbers of 4 bytes per rank (float64: 8); backward none. Saves the
            logits by reference and 12 bytes per token, of float64 logits 24.
    Errors: TypeError if tp_group is None or no ProcessGroup, or the logits are not floating; ValueError if
            chunk_size is below 1; RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
        chunk_size: ChunkSize | None,
        tp_group: Group[ProcessGroup, "tp"],
        inference_only: bool = False,
    ) -> Sharded[Tensor, "... tp=I"]:
        options = LogprobOptions(tp_group, with_entropy=True, chunk_size=chunk_size, inference_only=inference_only)
        return fused_logprob.forward(ctx, vocab_parallel_logits, None, options)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return fused_logprob.backward(ctx, *grad_outputs), None, None, None
