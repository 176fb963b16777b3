"""Vocab-parallel log-probabilities of k ids per token, normalised over the whole vocabulary.

Rank r of the group holds columns [vocab_start_index, vocab_end_index) of the logits of every token, and every
rank has all ids. Shards are in rank order; they may differ in width and be empty.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import joint
from torch_impl.vocab_parallel.joint import Plan


class ChunkedDistributedGatherLogprob(torch.autograd.Function):
    """Log-probabilities at given ids, for `.apply`.

        vocab_parallel_logits  "b s v/tp"     global_indices  "b s k"     ->   "b s k tp=I"

    out[..., j] = z[idx_j] - lse,   lse = log sum_v exp(z_v)
    d z = -p sum_j g_j + sum_j g_j 1[v = idx_j],   over the slots that somebody owns

    Any leading dims and strides. An id that nobody owns gives 0.0 and no gradient; duplicates add up; k may be 0.
    Columns of -inf are masked. Results are float32, for float64 logits float64; the gradient has the logits'
    dtype. Every tp rank passes the same cotangent.
    `chunk_size` (positions of s per block; None: chosen here) bounds the working set and may differ by rank.

    Cost:   forward 1 all_gather, (k + 2) * b*s numbers of 4 bytes per rank (float64: 8); backward none. Saves
            the logits by reference and 8 + 4 k bytes per token.
    Errors: TypeError if tp_group is None or no ProcessGroup, ids are not integers, logits not floating;
            ValueError if global_indices and logits disagree in shape, or the range or chunk_size do not fit;
            RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Float[Tensor, "*a v"],
        global_indices: Int[Tensor, "*a k"],
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int | None,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Float[Tensor, "*a k"]:
        plan = Plan(
            "vocab_parallel.ChunkedDistributedGatherLogprob",
            tp_group,
            vocab_start_index,
            vocab_end_index,
            chunk_size=chunk_size,
            inference_only=inference_only,
            several=True,
        )
        return joint.forward(ctx, vocab_parallel_logits, global_indices, plan)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return joint.backward(ctx, *grad_outputs), None, None, None, None, None, None
