"""Vocab-parallel negative entropy of each token's distribution.

Every rank of the group holds some columns of the logits of every token; which ones does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import joint
from torch_impl.vocab_parallel.joint import Plan


class ChunkedDistributedEntropy(torch.autograd.Function):
    """The negative entropy sum_v p_v log p_v, for `.apply`: the sign is that of a sum of log-probabilities.

        vocab_parallel_logits  "b s v/tp"     ->   "b s tp=I"

    h = sum_v p_v log p_v,   0 log 0 = 0,   -log V <= h <= 0
    d z = g p (log p - h)

    Any leading dims and strides. Columns of -inf are masked. Results are float32, for float64 logits float64; the
    gradient has the logits' dtype. Every tp rank passes the same cotangent.
    `chunk_size` (positions of s per block; None: chosen here) bounds the working set and may differ by rank.
    Together with a log-probability: `vocab_parallel_logprob(..., with_entropy=True)`, without another read.

    Cost:   forward 1 all_gather, 3 * b*s numbers of 4 bytes per rank (float64: 8); backward none. Saves the
            logits by reference and 12 bytes per token.
    Errors: TypeError if tp_group is None or no ProcessGroup, or the logits are not floating; ValueError if
            chunk_size is below 1; RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocab_parallel_logits: Float[Tensor, "*a v"],
        chunk_size: int | None,
        tp_group: ProcessGroup,
        inference_only: bool = False,
    ) -> Float[Tensor, "*a"]:
        plan = Plan(
            "vocab_parallel.ChunkedDistributedEntropy",
            tp_group,
            with_entropy=True,
            chunk_size=chunk_size,
            inference_only=inference_only,
        )
        return joint.forward(ctx, vocab_parallel_logits, None, plan)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return joint.backward(ctx, *grad_outputs), None, None, None
