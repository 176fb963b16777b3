"""Vocab-parallel Kullback-Leibler divergence between a student's distribution and a fixed teacher's, either way round.

Every rank of the group holds the same columns of both logits of every token. With two distributions a and b, d_v the
difference of their shifted logits (see `statistics`), and L the largest column of a,

    KL(a || b) = sum_v a_v (log a_v - log b_v) = d_L + E - log(1 + R_a) + log(1 + R_b),   E = sum_v a_v (d_v - d_L)

so that each rank sends six numbers of a row. The difference is computed column by column: a student that equals
its teacher has a divergence of exactly 0, which a difference of two entropies would not have. And E, to which L itself
adds nothing, has all its digits where a is almost certain of L: there the reverse gradient is -a_L E.
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

        student_logits  "b s v/tp"     teacher_logits  "b s v/tp"     ->   "b s tp=I"

    p = softmax(teacher_logits / temperature),   q = softmax(student_logits / temperature)
    forward   sum_v p_v (log p_v - log q_v)     d student = g (q - p) / temperature
    reverse   sum_v q_v (log q_v - log p_v)     d student = g q (log q - log p - KL) / temperature

    The teacher has no gradient. Any leading dims and strides. A column that the distribution of the mean masks (-inf)
    adds nothing; one that the other alone masks makes the divergence +inf, in reverse with a gradient that is not
    finite. The two dtypes may differ, and the sums run in the wider, float32 at least, which is the result's; the
    gradient has the student's dtype. Every tp rank passes the same cotangent. Some multiply the loss by temperature^2;
    this function does not. `chunk_size` bounds the working set: b * chunk_size rows (None: automatic).

    Cost:   forward 1 all_gather, 6 * b*s numbers of 4 bytes per rank (float64: 8); backward none. Saves both
            logits by reference and 16 bytes per token, in reverse 24; with float64 logits 32 and 48.
    Errors: TypeError if tp_group is None or no ProcessGroup, or logits are not floating; ValueError if the two
            disagree in shape, or temperature or chunk_size is out of range; RuntimeError in backward after
            inference_only=True.
    Source: arXiv 1503.02531 (distillation), arXiv 2306.08543 (reverse KL).
    """
    options = KlOptions(tp_group, reverse, float(temperature), chunk_size, inference_only)
    return _KlDivergence.apply(student_logits, teacher_logits, options)


class KlOptions(NamedTuple):
    """Everything but the tensors."""

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
        # 2. Merge them: the normalisers, then the difference at the largest column and the mean relative to it.
        norm_a = statistics.global_normaliser(row_max_a, row_sum_m1_a, options.temperature)
        norm_b = statistics.global_normaliser(row_max_b, row_sum_m1_b, options.temperature)
        gap_at_largest, excess = _global_gap(of_ranks, norm_a, norm_b, options.temperature)
        divergence = gap_at_largest + excess - (norm_a.log_row_sum - norm_b.log_row_sum)
        # 3. What backward needs.
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
    """m_r and R_r of a, those of b, d_L and E of this rank's columns, one row block at a time."""
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
    """d_L and E under the local softmax of a, where E is +inf if b alone masks a column; 0 for an empty shard."""
    row_max_a, row_sum_m1_a = of_a
    m_a, m_b = (torch.where(m.isfinite(), m, 0.0).unsqueeze(-1) for m in (row_max_a, row_max_b))
    shifted_a, shifted_b = _shifted(a_block, m_a, temperature), _shifted(b_block, m_b, temperature)
    is_masked = shifted_a == -math.inf
    # Tested on the logits, not on the probabilities, which underflow to 0 in one dtype earlier than in another.
    is_impossible = ((shifted_b == -math.inf) & ~is_masked).any(-1)
    gap = (shifted_a - shifted_b).masked_fill_(is_masked | (shifted_b == -math.inf), 0.0)
    # Of several equal largest columns it is their mean: an argmax would cost more, and has none in an empty shard.
    is_largest = shifted_a == 0
    gap_at_largest = torch.where(is_largest, gap, 0.0).sum(-1) / is_largest.sum(-1).clamp_min_(1)
    terms = shifted_a.exp_().mul_(gap.sub_(gap_at_largest.unsqueeze(-1)))
    excess = terms.sum(-1) / (1.0 + row_sum_m1_a)
    return torch.stack([gap_at_largest, torch.where(is_impossible, math.inf, excess)])


def _global_gap(
    of_ranks: Float[Tensor, "r 6 n"], norm_a: statistics.Normaliser, norm_b: statistics.Normaliser, temperature: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """d_L of the row's largest column, and E = sum_r w_r (E_r + d_r - d_L), w_r the share of rank r in a; +inf stays.

    d_r is the difference at the rank's largest column, relative to the row's maxima.
    """
    row_max_a, row_sum_m1_a, row_max_b, _, gap_r, excess_r = of_ranks.unbind(1)
    shifted_a = statistics.shifted_logits(row_max_a, norm_a.row_max, temperature)
    shifted_b = statistics.shifted_logits(row_max_b, norm_b.row_max, temperature)
    weight = (shifted_a + (row_sum_m1_a.log1p() - norm_a.log_row_sum)).exp()
    gap = gap_r + (shifted_a - shifted_b)
    gap_at_largest = gap.gather(0, row_max_a.argmax(0, keepdim=True))
    terms = torch.where(weight == 0, 0.0, weight * (excess_r + (gap - gap_at_largest)))
    is_impossible = ((excess_r == math.inf) & (row_max_a > -math.inf)).any(0)
    # There the difference at the largest column may be infinite of either sign: E alone says that the divergence is.
    return gap_at_largest.squeeze(0).masked_fill(is_impossible, 0.0), terms.sum(0).masked_fill(is_impossible, math.inf)


def _reverse_gradient(
    log_q: Float[Tensor, "n v"],
    log_p: Float[Tensor, "n v"],
    divergence: Float[Tensor, "n 1"],
    excess: Float[Tensor, "n 1"],
) -> Float[Tensor, "n v"]:
    """q (log q - log p - KL), 0 where q is; in place."""
    is_masked, is_likely = log_q == -math.inf, log_q > MORE_LIKELY_THAN_NOT
    # At the likely column this is -E: as q -> 1 its log ratio and KL become equal, and their difference has no digits.
    gap = torch.where(is_likely, -excess, (log_q - log_p).sub_(divergence))
    return log_q.exp_().mul_(gap).masked_fill_(is_masked, 0.0)


def _shifted(block: Float[Tensor, "n v"], row_max: Float[Tensor, "n 1"], temperature: float) -> Float[Tensor, "n v"]:
    """Shifted logits in the dtype of m: (z - m) / temperature."""
    return statistics.shifted_logits(no_narrower(block, row_max.dtype), row_max, temperature)
