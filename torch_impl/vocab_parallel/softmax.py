"""Softmax and log-softmax over a sharded vocabulary: each rank computes its own columns of every row."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import large_tensors
from torch_impl.collectives.plain import all_reduce_sum
from torch_impl.contract import Group, Sharded, contract
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions, row_statistics
from torch_impl.vocab_parallel.statistics import (
    Normaliser,
    aligned_row_blocks,
    gather_statistics,
    global_normaliser,
    minus_row_max,
    row_blocks,
    rows_per_block,
)

MORE_LIKELY_THAN_NOT = -math.log(2.0)  # at most one column of a row has a larger log-probability


@contract
def vocab_parallel_log_softmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"], tp_group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v/tp"]:
    """This rank's columns of the log-softmax over the full vocabulary, with its gradient.

    log p_v = z_v - lse,   lse = log sum_v exp(z_v),   z the `vocab_parallel_logits`
    d z_v = g_v - p_v sum_u g_u

    Computed in float32 or wider and rounded once, to the logits' dtype, as is the gradient. Any strides. Each rank
    passes the cotangents of its own columns; the ranks exchange their sum over the vocabulary. A row that is -inf on
    every rank gives NaN.

    Cost:   forward 1 all_gather, backward 1 all_reduce, each of 2 numbers per token, 4 bytes each (float64: 8). Saves
            the logits by reference and 8 bytes per token (float64 logits: 16).
    Errors: TypeError if tp_group is not a ProcessGroup, or the logits are not floating.
    """
    return _LogSoftmax.apply(vocab_parallel_logits, tp_group)


@torch.no_grad()
@contract("vocab_parallel.log_softmax")
def _compute_distributed_log_softmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"], group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v/tp"]:
    """This rank's columns of the log-softmax over the full vocabulary; not differentiable.

    log p_v = z_v - lse,   lse = log sum_v exp(z_v),   z the `vocab_parallel_logits`

    Computed in float32 or wider and rounded once. A row that is -inf on every rank gives NaN.

    Cost:   1 all_gather of 2 numbers per token, 4 bytes each (float64: 8). Reads the logits twice, writes the result
            once.
    Errors: TypeError if group is not a ProcessGroup, or the logits are not floating.
    """
    return _log_softmax(vocab_parallel_logits, _normaliser(vocab_parallel_logits, group))


@torch.no_grad()
@contract("vocab_parallel.softmax")
def _compute_distributed_softmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"], group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v/tp"]:
    """This rank's columns of the softmax over the full vocabulary; not differentiable.

    p_v = exp(z_v - lse),   lse = log sum_v exp(z_v),   z the `vocab_parallel_logits`

    Computed in float32 or wider and rounded once. Columns of -inf are exactly 0; a row that is -inf on every rank
    gives NaN.

    Cost:   1 all_gather of 2 numbers per token, 4 bytes each (float64: 8). Reads the logits twice, writes the result
            once.
    Errors: TypeError if group is not a ProcessGroup, or the logits are not floating.
    """
    logits, normaliser = vocab_parallel_logits, _normaliser(vocab_parallel_logits, group)
    result = large_tensors.empty(logits.shape, logits.dtype, logits.device)
    rows = result.view(len(normaliser.row_max), logits.shape[-1])
    for row_slice, block in row_blocks(logits, rows_per_block(logits, None)):
        rows[row_slice] = _log_p(block, normaliser, row_slice).exp().to(result.dtype)
    return result


class _LogSoftmax(torch.autograd.Function):
    """`vocab_parallel_log_softmax` for validated arguments."""

    @staticmethod
    def forward(ctx: Any, logits: Float[Tensor, "*a v"], group: ProcessGroup) -> Float[Tensor, "*a v"]:
        normaliser = _normaliser(logits, group)
        ctx.group = group
        ctx.save_for_backward(logits, *normaliser)
        return _log_softmax(logits, normaliser)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        logits, *per_row = ctx.saved_tensors
        normaliser, rows = Normaliser(*per_row), rows_per_block(logits, None)
        # 1. Sums of the cotangents over the vocabulary, separately for the column with p > 1/2 and for all others.
        sums = torch.empty(2, len(normaliser.row_max), dtype=normaliser.row_max.dtype, device=logits.device)
        for row_slice, (block, g) in aligned_row_blocks((logits, cotangent), rows):
            is_likely = _log_p(block, normaliser, row_slice) > MORE_LIKELY_THAN_NOT
            g = g.to(sums.dtype)
            sums[0, row_slice] = g.masked_fill(is_likely, 0.0).sum(-1)
            sums[1, row_slice] = torch.where(is_likely, g, 0.0).sum(-1)
        others, of_likely = sums if ctx.group.size() == 1 else all_reduce_sum(sums, ctx.group)
        # 2. The gradient, one row block at a time.
        gradient = large_tensors.empty(logits.shape, logits.dtype, logits.device)
        flat = gradient.view(sums.shape[1], logits.shape[-1])
        for row_slice, (block, g) in aligned_row_blocks((logits, cotangent), rows):
            log_p = _log_p(block, normaliser, row_slice)
            of_rows = (x[row_slice].unsqueeze(-1) for x in (others, of_likely))
            flat[row_slice] = _log_softmax_gradient(log_p, g.to(sums.dtype), *of_rows).to(flat.dtype)
        return gradient, None


def _log_softmax_gradient(
    log_p: Float[Tensor, "n v"], g: Float[Tensor, "n v"], others: Float[Tensor, "n 1"], of_likely: Float[Tensor, "n 1"]
) -> Float[Tensor, "n v"]:
    """g - p (others + of_likely): `of_likely` is g at the column with p > 1/2, `others` the sum of all other g."""
    p = log_p.exp()
    # At the likely column g - p g would cancel as p -> 1, hence g (1 - p) - p others, with 1 - p = -expm1(log p).
    at_likely = -g * torch.expm1(log_p) - p * others
    return torch.where(log_p > MORE_LIKELY_THAN_NOT, at_likely, g - p * (others + of_likely))


def _log_softmax(logits: Float[Tensor, "*a v"], normaliser: Normaliser) -> Float[Tensor, "*a v"]:
    """Log-probabilities in the logits' dtype, one row block at a time."""
    result = large_tensors.empty(logits.shape, logits.dtype, logits.device)
    rows = result.view(len(normaliser.row_max), logits.shape[-1])
    for row_slice, block in row_blocks(logits, rows_per_block(logits, None)):
        rows[row_slice] = _log_p(block, normaliser, row_slice).to(result.dtype)
    return result


def _normaliser(logits: Tensor, group: ProcessGroup) -> Normaliser:
    """The normaliser of each row over all ranks' columns."""
    # Reads the logits once; the caller reads them again for the result.
    row_max_r, row_sum_m1_r = gather_statistics(row_statistics(logits, None, LogprobOptions(group)), group).unbind(1)
    return global_normaliser(row_max_r, row_sum_m1_r, 1.0)


def _log_p(block: Tensor, normaliser: Normaliser, row_slice: slice) -> Tensor:
    """Log-probabilities of one row block, in the accumulation dtype."""
    # Subtract m first: z - m is exact near the maximum, where subtracting lse at once would lose digits.
    shifted = minus_row_max(block, normaliser.row_max[row_slice].unsqueeze(-1))
    return shifted.sub_(normaliser.log_row_sum[row_slice].unsqueeze(-1))
