"""Log-probabilities of one target or of k ids per token, and the negative entropy, from logits sharded by vocabulary.

Rank r of the group has columns [vocab_start_index, vocab_end_index) of every token's logits, and every rank has every
target. Shards are in rank order; they may differ in width and be empty. Columns of a shard beyond the range, such as
the padding of a vocabulary, count in the softmax and are never a target. Call `vocab_parallel_logprob`; the autograd
Functions below it have the names and arguments of NeMo-RL. All of them call `fused_logprob.forward` and
`fused_logprob.backward`.
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
    """Log-probability of each target token; with `with_entropy` a pair (log-probability, sum p log p).

    log p[t] = y[t] - lse,   y = z / temperature,   lse = log sum_v exp(y_v),   z the `vocab_parallel_logits`
    d z = (g_lp (1[v=t] - p) + g_h p (log p - h)) / temperature,   h = sum_v p_v log p_v, the negative entropy

    Any strides. A `target` outside the vocabulary (-100, padding) gives 0.0. Its gradient row is zero, even if the
    logits are NaN, unless the entropy of the row has a cotangent.
    Columns of -inf are masked. Results are float32 (float64 for float64 logits); the gradient has the logits'
    dtype. Every tp rank passes the same cotangent.
    `chunk_size` bounds the working set, b * chunk_size consecutive rows at a time (None: chosen automatically), and may
    differ by rank; Triton, which needs no working set, takes all rows.
    `inplace_gradient` writes the gradient into the memory of the logits. If another operation saved the logits for its
    own backward, autograd raises an error there.
    `backend`: "auto" is Triton on CUDA and eager elsewhere; "eager", "compile" and "triton" force one.

    Cost:   forward 1 all_gather of 3 numbers per token (with entropy 4), 4 bytes each (float64: 8); backward none.
            Saves the logits by reference and 12 bytes per token (with entropy 16); float64 logits 20 (28).
    Errors: TypeError if tp_group is not a ProcessGroup, ids are not int32 or int64, logits not floating;
            ValueError if target and logits disagree in shape, the range does not fit the shard, chunk_size,
            temperature or backend are out of range, or inplace_gradient=True for logits with elements that may share
            memory; ImportError if backend needs triton; RuntimeError in backward after inference_only=True.
    Source: arXiv 1805.02867 (online softmax), arXiv 1909.08053 (vocab-parallel cross entropy).
    """
    # If Triton is requested and cannot run, fail here, before any collective.
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
    """Whether elements may share memory, as in an expanded tensor, so that a gradient cannot overwrite them.

    False if each dim steps over all elements of the dims with smaller strides, as in every slice and permutation of a
    contiguous tensor.
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

    out = z[target] / temperature - lse,   z the `vocab_parallel_logits`. Value, gradient and dtypes are as in
    `vocab_parallel_logprob`.

    Cost:   as `vocab_parallel_logprob`.
    Errors: as `vocab_parallel_logprob`.
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

    The chunk size is local: it bounds the working set for this rank's `vocab_parallel_logits`, may differ from rank to
    rank, and changes neither values nor collectives. All else is as in `DistributedLogprob`.

    Cost:   as `DistributedLogprob`.
    Errors: as `vocab_parallel_logprob`.
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

    out[..., j] = z[idx_j] - lse,   lse = log sum_v exp(z_v),   z the `vocab_parallel_logits`, idx the `global_indices`
    d z = -p sum_j g_j + sum_j g_j 1[v = idx_j],   over the ids in the vocabulary

    Any strides. An id outside the vocabulary gives 0.0 and no gradient; duplicates add up; k may be 0.
    Columns of -inf are masked. Results are float32 (float64 for float64 logits); the gradient has the logits'
    dtype. Every tp rank passes the same cotangent.
    `chunk_size` bounds the working set, b * chunk_size consecutive rows at a time (None: chosen automatically), and may
    differ by rank; Triton, which needs no working set, takes all rows.

    Cost:   forward 1 all_gather of k + 2 numbers per token, 4 bytes each (float64: 8); backward none. Saves the logits
            by reference and 8 + 4 k bytes per token (float64 logits: 16 + 4 k).
    Errors: TypeError if tp_group is not a ProcessGroup, ids are not int32 or int64, logits not floating;
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
    """The negative entropy sum_v p_v log p_v of each row, for `.apply`.

    h = sum_v p_v log p_v,   0 log 0 = 0,   -log V <= h <= 0,   p = softmax(vocab_parallel_logits)
    d z = g p (log p - h)

    Any strides, and any assignment of columns to ranks. Columns of -inf are masked. Results are float32 (float64 for
    float64 logits); the gradient has the logits' dtype. Every tp rank passes the same cotangent.
    `chunk_size` bounds the working set, b * chunk_size consecutive rows at a time (None: chosen automatically), and may
    differ by rank; Triton, which needs no working set, takes all rows.
    `vocab_parallel_logprob(..., with_entropy=True)` returns it beside a log-probability, without another read.

    Cost:   forward 1 all_gather of 3 numbers per token, 4 bytes each (float64: 8); backward none. Saves the logits by
            reference and 12 bytes per token (float64 logits: 24).
    Errors: TypeError if tp_group is not a ProcessGroup, or the logits are not floating; ValueError if
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
