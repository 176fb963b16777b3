"""Softmax and log-softmax of rows whose vocabulary is sharded over the ranks: each rank gets its own columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Group, Sharded, contract
from torch_impl.vocab_parallel.fused_logprob import LogprobOptions, row_statistics
from torch_impl.vocab_parallel.statistics import (
    Normaliser,
    gather_statistics,
    global_normaliser,
    row_blocks,
    rows_per_block,
    shifted_block,
)


@torch.no_grad()
@contract("vocab_parallel.log_softmax")
def _compute_distributed_log_softmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"], group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v/tp"]:
    """Log-softmax over the full vocabulary, of this rank's columns; not differentiable.

        vocab_parallel_logits  "b s v/tp"   ->   "b s v/tp" (no gradient)

    log p_v = z_v - lse,   lse = log sum_v exp(z_v), computed in float32 or wider and rounded once.

    Any leading dims. A row that is -inf on every rank gives NaN.
    Cost:   1 all_gather of 2 * b*s numbers of 4 bytes (float64: 8). Reads the logits twice, writes the result
            once.
    Errors: TypeError if group is None or no ProcessGroup, or the logits are not floating.
    """
    logits, normaliser = vocab_parallel_logits, _normaliser(vocab_parallel_logits, group)
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = result.view(len(normaliser.row_max), logits.shape[-1])
    for row_slice, block in row_blocks(logits, rows_per_block(logits, None)):
        rows[row_slice] = _log_p(block, normaliser, row_slice).to(result.dtype)
    return result


@torch.no_grad()
@contract("vocab_parallel.softmax")
def _compute_distributed_softmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"], group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v/tp"]:
    """Softmax over the full vocabulary, of this rank's columns; not differentiable.

        vocab_parallel_logits  "b s v/tp"   ->   "b s v/tp" (no gradient)

    p_v = exp(z_v - lse),   lse = log sum_v exp(z_v), computed in float32 or wider and rounded once.

    Any leading dims. Columns of -inf are exactly 0; a row that is -inf on every rank gives NaN.
    Cost:   1 all_gather of 2 * b*s numbers of 4 bytes (float64: 8). Reads the logits twice, writes the result
            once.
    Errors: TypeError if group is None or no ProcessGroup, or the logits are not floating.
    """
    logits, normaliser = vocab_parallel_logits, _normaliser(vocab_parallel_logits, group)
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = result.view(len(normaliser.row_max), logits.shape[-1])
    for row_slice, block in row_blocks(logits, rows_per_block(logits, None)):
        rows[row_slice] = _log_p(block, normaliser, row_slice).exp().to(result.dtype)
    return result


def _normaliser(logits: Tensor, group: ProcessGroup) -> Normaliser:
    """lse of each row over all ranks' columns."""
    # One read of the logits for the normaliser; the caller reads them again for the result.
    row_max_r, row_sum_m1_r = gather_statistics(row_statistics(logits, None, LogprobOptions(group)), group).unbind(1)
    return global_normaliser(row_max_r, row_sum_m1_r, 1.0)


def _log_p(block: Tensor, normaliser: Normaliser, row_slice: slice) -> Tensor:
    """Log-probabilities of one row block, in the accumulation dtype."""
    # Two subtractions, in this order: z - m is exact near the maximum, where lse alone would have lost digits.
    shifted = shifted_block(block, normaliser.row_max[row_slice].unsqueeze(-1))
    return shifted.sub_(normaliser.log_row_sum[row_slice].unsqueeze(-1))
