"""Vocab-parallel Kullback-Leibler divergence between a student and a fixed teacher, forward or reverse.

Each rank holds the same columns of the student's and the teacher's logits, for every token. Let a and b be the two
distributions, d_v the difference of their shifted logits (see `statistics`), and L the largest column of a. Then

    KL(a || b) = sum_v a_v (log a_v - log b_v) = d_L + E - log(1 + R_a) + log(1 + R_b),   E = sum_v a_v (d_v - d_L)

and each rank sends six numbers per row. The difference is computed column by column, so a student that equals its
teacher has a divergence of exactly 0; a difference of two entropies would not be 0. Column L adds nothing to E, so E
keeps all its digits as a_L -> 1, where the reverse gradient is -a_L E.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, large_tensors
from torch_impl.contract import Group, Positive, Sharded, contract
from torch_impl.contract.derivatives import first_derivative_only
from torch_impl.vocab_parallel import statistics
from torch_impl.vocab_parallel.cross_entropy import difference_of_probabilities, no_narrower
from torch_impl.vocab_parallel.fused_logprob import NOTHING_SAVED, LogprobOptions, block_function
from torch_impl.vocab_parallel.softmax import MORE_LIKELY_THAN_NOT
from torch_impl.vocab_parallel.statistics import aligned_row_blocks, rows_per_block
from torch_impl.vocab_parallel.vocab_range import ChunkSize


@contract
def vocab_parallel_kl(
    student_logits: Sharded[Tensor, "... v/tp"],
    teacher_logits: Sharded[Tensor, "... v/tp"],
    tp_group: Group[ProcessGroup, "tp"],
    *,
    reverse: bool = False,
    temperature: Positive = 1.0,
    chunk_size: ChunkSize | None = None,
    inference_only: bool = False,
) -> Sharded[Tensor, "... tp=I"]:
    """Divergence of a student from a teacher over the full vocabulary: KL(p || q), or with `reverse` KL(q || p).

    p = softmax(teacher_logits / temperature),   q = softmax(student_logits / temperature)
    forward   sum_v p_v (log p_v - log q_v)     d student = g (q - p) / temperature
    reverse   sum_v q_v (log q_v - log p_v)     d student = g q (log q - log p - KL) / temperature

    The teacher has no gradient. Any strides. A column masked (-inf) in the distribution that weights the mean (p, in
    reverse q) adds nothing. A column masked only in the other one makes the divergence +inf; the reverse gradient is
    then not finite. The two dtypes may differ: sums and result have the wider dtype, at least float32, and the gradient
    has the student's dtype. Every tp rank passes the same cotangent. The loss is not multiplied by temperature^2.
    `chunk_size` bounds the working set: b * chunk_size rows (None: automatic).

    Cost:   forward 1 all_gather of 6 numbers per token, 4 bytes each (float64: 8); backward none. Saves both logits by
            reference and 16 bytes per token, in reverse 24 (float64 logits: 32 and 48).
    Errors: TypeError if tp_group is not a ProcessGroup, or logits are not floating; ValueError if their shapes differ,
            or temperature or chunk_size is out of range; RuntimeError in backward after inference_only=True.
    Source: arXiv 1503.02531 (distillation), arXiv 2306.08543 (reverse KL).
    """
    options = KlOptions(tp_group, reverse, float(temperature), chunk_size, inference_only)
    return _KlDivergence.apply(student_logits, teacher_logits, options)


class KlOptions(NamedTuple):
    """All arguments except the tensors."""

    group: ProcessGroup
    reverse: bool
    temperature: float
    chunk_size: int | None
    inference_only: bool


class _KlDivergence(torch.autograd.Function):
    """`vocab_parallel_kl` of validated arguments."""

    @staticmethod
    def forward(
        ctx: Any, student: Float[Tensor, "*a v"], teacher: Float[Tensor, "*a v"], options: KlOptions
    ) -> Float[Tensor, "*a"]:
        a, b = (student, teacher) if options.reverse else (teacher, student)
        # 1. Six numbers per row and rank, in one exchange.
        of_ranks = statistics.gather_statistics(_rank_statistics(a, b, options), options.group)
        row_max_a, row_sum_m1_a, row_max_b, row_sum_m1_b, _, _ = of_ranks.unbind(1)
        # 2. Merge the ranks' numbers: the normalisers, then the difference at the largest column, and the mean of the
        #    differences relative to it.
        norm_a = statistics.global_normaliser(row_max_a, row_sum_m1_a, options.temperature)
        norm_b = statistics.global_normaliser(row_max_b, row_sum_m1_b, options.temperature)
        gap_at_largest, excess = _global_gap(of_ranks, norm_a, norm_b, options.temperature)
        divergence = gap_at_largest + excess - (norm_a.log_row_sum - norm_b.log_row_sum)
        # 3. Save for backward.
        ctx.options = options
        if not options.inference_only:
            of_reverse = (divergence, excess) if options.reverse else ()
            ctx.save_for_backward(a, b, *norm_a, *norm_b, *of_reverse)
        return divergence.view(student.shape[:-1])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        options: KlOptions = ctx.options
        if options.inference_only:
            raise RuntimeError(NOTHING_SAVED)
        a, b, *per_row = ctx.saved_tensors
        student = a if options.reverse else b
        gradient = large_tensors.empty(student.shape, student.dtype, student.device)
        flat = gradient.view(per_row[0].numel(), student.shape[-1])
        columns = [x.reshape(-1, 1) for x in (*per_row, cotangent)]
        for row_slice, (a_block, b_block) in aligned_row_blocks((a, b), rows_per_block(a, options.chunk_size)):
            row_max_a, log_row_sum_a, row_max_b, log_row_sum_b, *of_reverse, g = (x[row_slice] for x in columns)
            log_a = _shifted(a_block, row_max_a, options.temperature).sub_(log_row_sum_a)
            log_b = _shifted(b_block, row_max_b, options.temperature).sub_(log_row_sum_b)
            if options.reverse:
                d_student = _reverse_gradient(log_a, log_b, *of_reverse)
            else:
                d_student = difference_of_probabilities(log_b, log_a)
            flat[row_slice] = d_student.mul_(g / options.temperature)
        return gradient, None, None


def _rank_statistics(a: Float[Tensor, "*a v"], b: Float[Tensor, "*a v"], options: KlOptions) -> Float[Tensor, "6 n"]:
    """This rank's m_r and R_r of a, m_r and R_r of b, d_L and E, one row block at a time."""
    dtype = torch.promote_types(accumulator(a.dtype), accumulator(b.dtype))
    rank_statistics = torch.empty(6, a.shape[:-1].numel(), dtype=dtype, device=a.device)
    local = block_function(statistics.local_statistics, LogprobOptions(None), a)
    for row_slice, blocks in aligned_row_blocks((a, b), rows_per_block(a, options.chunk_size)):
        a_block, b_block = (no_narrower(block, dtype) for block in blocks)
        of_a, of_b = (local(block, None, options.temperature, False) for block in (a_block, b_block))
        gap = _local_gap(a_block, b_block, of_a, of_b[0], options.temperature)
        rank_statistics[:, row_slice] = torch.cat([of_a, of_b, gap])
    return rank_statistics


def _local_gap(
    a_block: Float[Tensor, "n v"],
    b_block: Float[Tensor, "n v"],
    of_a: Float[Tensor, "2 n"],
    row_max_b: Float[Tensor, " n"],
    temperature: float,
) -> Float[Tensor, "2 n"]:
    """d_L and E under the local softmax of a; E is +inf if b alone masks a column; both are 0 for an empty shard."""
    row_max_a, row_sum_m1_a = of_a
    m_a, m_b = (torch.where(m.isfinite(), m, 0.0).unsqueeze(-1) for m in (row_max_a, row_max_b))
    shifted_a, shifted_b = _shifted(a_block, m_a, temperature), _shifted(b_block, m_b, temperature)
    is_masked = shifted_a == -math.inf
    # Tested on the logits: probabilities underflow to 0, in a narrow dtype earlier than in a wide one.
    is_impossible = ((shifted_b == -math.inf) & ~is_masked).any(-1)
    gap = (shifted_a - shifted_b).masked_fill_(is_masked | (shifted_b == -math.inf), 0.0)
    # The mean over all columns that equal the largest: an argmax costs more, and fails on an empty shard.
    is_largest = shifted_a == 0
    gap_at_largest = torch.where(is_largest, gap, 0.0).sum(-1) / is_largest.sum(-1).clamp_min_(1)
    terms = shifted_a.exp_().mul_(gap.sub_(gap_at_largest.unsqueeze(-1)))
    excess = terms.sum(-1) / (1.0 + row_sum_m1_a)
    return torch.stack([gap_at_largest, torch.where(is_impossible, math.inf, excess)])


def _global_gap(
    of_ranks: Float[Tensor, "r 6 n"], norm_a: statistics.Normaliser, norm_b: statistics.Normaliser, temperature: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(d_L, E) of full rows: E = sum_r w_r (E_r + d_r - d_L), w_r the share of rank r in a; +inf stays.

    d_r is the difference at rank r's largest column, relative to the maxima of the full row.
    """
    row_max_a, row_sum_m1_a, row_max_b, _, gap_r, excess_r = of_ranks.unbind(1)
    shifted_a = statistics.shifted_logits(row_max_a, norm_a.row_max, temperature)
    shifted_b = statistics.shifted_logits(row_max_b, norm_b.row_max, temperature)
    weight = (shifted_a + (row_sum_m1_a.log1p() - norm_a.log_row_sum)).exp()
    gap = gap_r + (shifted_a - shifted_b)
    gap_at_largest = gap.gather(0, row_max_a.argmax(0, keepdim=True))
    terms = torch.where(weight == 0, 0.0, weight * (excess_r + (gap - gap_at_largest)))
    is_impossible = ((excess_r == math.inf) & (row_max_a > -math.inf)).any(0)
    # In such a row d_L may be +inf or -inf, so it is set to 0, and E = +inf makes the divergence +inf.
    return gap_at_largest.squeeze(0).masked_fill(is_impossible, 0.0), terms.sum(0).masked_fill(is_impossible, math.inf)


def _reverse_gradient(
    log_q: Float[Tensor, "n v"],
    log_p: Float[Tensor, "n v"],
    divergence: Float[Tensor, "n 1"],
    excess: Float[Tensor, "n 1"],
) -> Float[Tensor, "n v"]:
    """q (log q - log p - KL), and 0 where q is 0; in place."""
    is_masked, is_likely = log_q == -math.inf, log_q > MORE_LIKELY_THAN_NOT
    # At the likely column the factor is -E: as q -> 1 the log ratio and KL become equal, and their difference cancels.
    gap = torch.where(is_likely, -excess, (log_q - log_p).sub_(divergence))
    return log_q.exp_().mul_(gap).masked_fill_(is_masked, 0.0)


def _shifted(block: Float[Tensor, "n v"], row_max: Float[Tensor, "n 1"], temperature: float) -> Float[Tensor, "n v"]:
    """Shifted logits (z - m) / temperature, in the dtype of m."""
    return statistics.shifted_logits(no_narrower(block, row_max.dtype), row_max, temperature)
