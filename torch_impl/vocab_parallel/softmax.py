"""Softmax and log-softmax of rows whose vocabulary is cut over the ranks: each rank gets its own columns."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.vocab_parallel import fused_logprob
from torch_impl.vocab_parallel.arguments import check_logits, checked_tp_group
from torch_impl.vocab_parallel.statistics import Normaliser, below, block_rows, exchanged, merged_normaliser, row_blocks


@torch.no_grad()
def _compute_distributed_log_softmax(
    vocab_parallel_logits: Float[Tensor, "*a v"], group: ProcessGroup
) -> Float[Tensor, "*a v"]:
    """Log-softmax over the whole vocabulary, of this rank's columns; not differentiable.

        vocab_parallel_logits  "b s v/tp"   ->   "b s v/tp" (no gradient)

    log p_v = z_v - lse,   lse = log sum_v exp(z_v), computed in float32 or wider and rounded once.

    Any leading dims. A row that is -inf on every rank gives NaN.
    Cost:   1 all_gather of 2 * b*s numbers of 4 bytes (float64: 8). Reads the logits twice, writes the result
            once.
    Errors: TypeError if group is None or no ProcessGroup, or the logits are not floating.
    """
    logits, whole = vocab_parallel_logits, _normaliser("log_softmax", vocab_parallel_logits, group)
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = result.view(len(whole.largest), logits.shape[-1])
    for part, block in row_blocks(logits, block_rows(logits, None)):
        rows[part] = _log_p(block, whole, part).to(result.dtype)
    return result


@torch.no_grad()
def _compute_distributed_softmax(
    vocab_parallel_logits: Float[Tensor, "*a v"], group: ProcessGroup
) -> Float[Tensor, "*a v"]:
    """Softmax over the whole vocabulary, of this rank's columns; not differentiable.

        vocab_parallel_logits  "b s v/tp"   ->   "b s v/tp" (no gradient)

    p_v = exp(z_v - lse),   lse = log sum_v exp(z_v), computed in float32 or wider and rounded once.

    Any leading dims. Columns of -inf are exactly 0; a row that is -inf on every rank gives NaN.
    Cost:   1 all_gather of 2 * b*s numbers of 4 bytes (float64: 8). Reads the logits twice, writes the result
            once.
    Errors: TypeError if group is None or no ProcessGroup, or the logits are not floating.
    """
    logits, whole = vocab_parallel_logits, _normaliser("softmax", vocab_parallel_logits, group)
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows = result.view(len(whole.largest), logits.shape[-1])
    for part, block in row_blocks(logits, block_rows(logits, None)):
        rows[part] = _log_p(block, whole, part).exp().to(result.dtype)
    return result


def _normaliser(function: str, logits: Tensor, group: ProcessGroup) -> Normaliser:
    """lse of each row over all ranks' columns."""
    group = checked_tp_group(f"vocab_parallel.{function}", "group", group)
    check_logits(f"vocab_parallel.{function}", "vocab_parallel_logits", logits)
    plan = fused_logprob.Plan(f"vocab_parallel.{function}", group)
    m_r, rest_r = exchanged(fused_logprob.statistics_of(logits, None, plan), group).unbind(1)
    return merged_normaliser(m_r, rest_r, 1.0)


def _log_p(block: Tensor, whole: Normaliser, part: slice) -> Tensor:
    """Log-probabilities of one row block, in the accumulation dtype."""
    return below(block, whole.largest[part].unsqueeze(-1), 1.0).sub_(whole.log_total[part].unsqueeze(-1))
