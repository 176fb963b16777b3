"""Vocab-parallel cross entropy of a student against a target distribution.

Each rank holds the same columns of the student's and the target's logits, for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, large_tensors
from torch_impl.contract import Group, Sharded, contract
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.fused_logprob import NOTHING_SAVED, LogprobOptions, block_function
from torch_impl.vocab_parallel.statistics import aligned_row_blocks, rows_per_block


class DistributedCrossEntropy(torch.autograd.Function):
    """Soft-target cross entropy H(p, q) of each token, for `.apply`.

    H = -sum_v p_v log q_v,   p = softmax(target_logits),   q = softmax(student_logits)
    d student = g (q - p);    the target has no gradient

    Any strides. A column masked in the target (-inf) adds nothing; a column masked in the student alone makes H +inf,
    with the same gradient. The two dtypes may differ: sums and result have the wider dtype, at least float32, and the
    gradient has the student's dtype. Every tp rank passes the same cotangent.

    Cost:   forward 1 all_gather of 5 numbers per token, 4 bytes each (float64: 8); backward none. Saves both logits by
            reference and 16 bytes per token (32 for float64 logits).
    Errors: TypeError if group is not a ProcessGroup, or logits are not floating; ValueError if their shapes differ;
            RuntimeError in backward after inference_only=True.
    """

    @staticmethod
    @contract
    def forward(
        ctx: Any,
        student_logits: Sharded[Tensor, "... v/tp"],
        target_logits: Sharded[Tensor, "... v/tp"],
        group: Group[ProcessGroup, "tp"],
        inference_only: bool = False,
    ) -> Sharded[Tensor, "... tp=I"]:
        # 1. Five numbers per row and rank, in one exchange.
        of_ranks = statistics.gather_statistics(_local_statistics(student_logits, target_logits), group)
        of_ranks = of_ranks.view(*of_ranks.shape[:2], *student_logits.shape[:-1])
        row_max_q, row_sum_m1_q, row_max_p, row_sum_m1_p, cross_mean_r = of_ranks.unbind(1)
        # 2. Merge the ranks' numbers: the normalisers of q and p, then the cross term.
        q = statistics.global_normaliser(row_max_q, row_sum_m1_q, 1.0)
        p = statistics.global_normaliser(row_max_p, row_sum_m1_p, 1.0)
        ctx.inference_only = inference_only
        if not inference_only:
            ctx.save_for_backward(student_logits, target_logits, *q, *p)
        return q.log_row_sum - statistics.global_cross_mean(row_max_q, row_max_p, row_sum_m1_p, cross_mean_r, q, p)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.inference_only:
            raise RuntimeError(NOTHING_SAVED)
        student, target, *per_row = ctx.saved_tensors
        gradient = large_tensors.empty((per_row[0].numel(), student.shape[-1]), student.dtype, student.device)
        per_row = [x.reshape(-1, 1) for x in (*per_row, *grad_outputs)]
        for row_slice, (student_block, target_block) in aligned_row_blocks(
            (student, target), rows_per_block(student, None)
        ):
            # Recompute q and p from the logits, block by block: no probability is saved.
            row_max_q, log_row_sum_q, row_max_p, log_row_sum_p, g = (x[row_slice] for x in per_row)
            log_q = statistics.minus_row_max(no_narrower(student_block, g.dtype), row_max_q).sub_(log_row_sum_q)
            log_p = statistics.minus_row_max(no_narrower(target_block, g.dtype), row_max_p).sub_(log_row_sum_p)
            gradient[row_slice] = difference_of_probabilities(log_q, log_p).mul_(g)
        return gradient.view(student.shape), None, None, None


def difference_of_probabilities(log_q: Float[Tensor, "n v"], log_p: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """q - p = +-max(q, p) (1 - exp(-|log q - log p|)), which does not cancel where both are almost 1; in place."""
    log_q, log_p = statistics.without_minus_infinity(log_q), statistics.without_minus_infinity(log_p)
    # Buffers are reused from here on: log_q becomes max(q, p), and log_p the factor.
    gap = log_q - log_p
    larger = torch.maximum(log_q, log_p, out=log_q).exp_()
    share = torch.abs(gap, out=log_p).neg_().expm1_().neg_()
    return larger.mul_(share).copysign_(gap)


def no_narrower(block: Tensor, dtype: torch.dtype) -> Tensor:
    """The block itself if its sums run in `dtype`, else a copy in `dtype`."""
    return block if accumulator(block.dtype) == dtype else block.to(dtype)


def _local_statistics(student: Float[Tensor, "*a v"], target: Float[Tensor, "*a v"]) -> Float[Tensor, "f n"]:
    """m_r and R_r of the student, m_r and R_r of the target, and the cross mean, one row block at a time."""
    dtype = torch.promote_types(accumulator(student.dtype), accumulator(target.dtype))
    rank_statistics = torch.empty(5, student.shape[:-1].numel(), dtype=dtype, device=student.device)
    local = block_function(statistics.local_statistics, LogprobOptions(None), student)
    for row_slice, blocks in aligned_row_blocks((student, target), rows_per_block(student, None)):
        q_block, p_block = (no_narrower(block, dtype) for block in blocks)
        q, p = (local(block, None, 1.0, False) for block in (q_block, p_block))
        cross_mean_r = statistics.local_cross_mean(q_block, p_block, q[0], p[0], p[1])
        rank_statistics[:, row_slice] = torch.cat([q, p, cross_mean_r.unsqueeze(0)])
    return rank_statistics
