"""Softmax statistics of a rank's columns, and how the ranks merge them.

A *row* is the logits of one token; every rank holds V_l columns of it. A *shifted logit* b_v is the logit minus the
largest logit of its row, divided by the temperature: 0 for the largest, at most 0 for the others. A rank reads its
columns once and computes, per row and in float32 or wider, its *local statistics*:

    name            letter
    row_max_r       m_r = max_v z_v                 -inf for an empty or fully masked shard
    row_sum_m1_r    R_r = sum_v exp(b_v) - 1        b_v = (z_v - m_r) / temperature; leaves out the 1 of a largest logit
    z_t                                             the id's logit, NaN if that is +inf; +inf if the id is on another
                                                    rank; one for each id
    shifted_mean_r  d_r = sum_v p_v b_v             for the entropy; p is the local softmax; 0 for an empty shard
    cross_mean_r    x_r = sum_v p_v b^q_v           the same mean of q's shifted logits, for the cross entropy;
                                                    -inf if a column has p > 0 and q = 0

One all_gather exchanges the ranks' numbers. Every rank merges them by the same arithmetic in the same order, so the
results are equal to the bit. Names of merged numbers have no `_r`. The normaliser lse = m / temperature + log(1 + R) is
stored as `row_max` and `log_row_sum` = log(1 + R): in one float32 near 1000, log(1 + R) would be accurate only to 6e-5.
And since 1 + R would lose a small R, `row_sum_m1` is the row's sum minus 1, as in expm1 and log1p.

Logits with any strides are read in row blocks, a few rows at a time, without a copy of all logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import all_gather_stack
from torch_impl.vocab_parallel import long_rows
from torch_impl.vocab_parallel.long_rows import LOG2_E, LOWEST_SHIFTED

ON_ANOTHER_RANK = -1  # column of an id that this rank does not have
OUT_OF_VOCABULARY = -2  # column of an id that no rank has

# Bytes of a row block in the accumulation dtype: on a CPU it should fit a core's cache, on a GPU fill the device.
BLOCK_BYTES = {"cpu": 1 << 20}
BLOCK_BYTES_ELSEWHERE = 1 << 26


def rows_per_block(logits: Float[Tensor, "*a v"], chunk_size: int | None) -> int:
    """Rows of one block: the rows of `chunk_size` positions, or without it BLOCK_BYTES of rows.

    This is the rule for eager operations, which read a block several times, so it must fit a cache. Long rows on a CPU
    are read in tiles and have another rule (`long_rows.rows_per_block`), as have other backends
    (`fused_logprob.rows_per_block_of_backend`).

    A block of logits [b, s, v] has `chunk_size * b` rows. These are consecutive among the b * s rows, so a block may
    hold different positions of each batch entry.
    """
    if chunk_size is not None:
        return max(1, chunk_size * math.prod(logits.shape[:-2]))
    row_bytes = logits.shape[-1] * accumulator(logits.dtype).itemsize
    return max(1, BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES_ELSEWHERE) // max(1, row_bytes))


def row_blocks(x: Float[Tensor, "*a v"], rows: int) -> Iterator[tuple[slice, Float[Tensor, "n v"]]]:
    """(slice of the rows of x, view of them) for consecutive views of at most `rows` rows."""
    n = math.prod(x.shape[:-1])
    if n <= rows and x.is_contiguous():  # one block, as in every small call
        return iter([(slice(0, n), x.view(n, x.shape[-1]))])
    return ((row_slice, view) for row_slice, (view,) in aligned_row_blocks((x,), rows))


def aligned_row_blocks(xs: Sequence[Tensor], rows: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """`row_blocks` of several tensors of one shape and any strides: each block has the same rows of every tensor."""
    done = 0
    for views in _row_views(xs, rows):
        n = len(views[0])
        yield slice(done, done + n), views
        done += n


def rows_of(x: Tensor, row_slice: slice) -> Tensor:
    """x[row_slice], or x itself for a slice of all rows: small calls have one block, and a view takes a microsecond."""
    return x if row_slice.stop - row_slice.start == x.shape[0] else x[row_slice]


def _row_views(xs: Sequence[Tensor], rows: int) -> Iterator[tuple[Tensor, ...]]:
    if xs[0].ndim == 1:
        yield tuple(x.unsqueeze(0) for x in xs)
        return
    n, width = math.prod(xs[0].shape[:-1]), xs[0].shape[-1]
    try:
        flat = tuple(x.view(n, width) for x in xs)
    except RuntimeError:  # strides without a flat view, such as z[:, :-1]: take one leading index at a time
        for parts in zip(*(x.unbind(0) for x in xs), strict=True):
            yield from _row_views(parts, rows)
    else:
        yield from [flat] if n <= rows else zip(*(x.split(rows) for x in flat), strict=True)


class Normaliser(NamedTuple):
    """The two numbers that turn logits into log-probabilities, log p = (z - row_max) / temperature - log_row_sum."""

    row_max: Float[Tensor, "*a"]  # m
    log_row_sum: Float[Tensor, "*a"]  # log(1 + R)


class RankStatistics(NamedTuple):
    """The local statistics of every rank of a group, in rank order; None for statistics that were not computed."""

    row_max_r: Float[Tensor, "r n"]
    row_sum_m1_r: Float[Tensor, "r n"]
    z_t_r: Float[Tensor, "r k n"] | None
    shifted_mean_r: Float[Tensor, "r n"] | None


def has_full_rows(group: ProcessGroup | None) -> bool:
    """Whether this rank has the full vocabulary: without a group, or in a group of one."""
    return group is None or group.size() == 1


def local_column(target: Int[Tensor, "*n"], start: int, end: int, absent: int = ON_ANOTHER_RANK) -> Int[Tensor, "*n"]:
    """Column of each target within this rank's ids [start, end), or `absent`."""
    if start == end:  # the clamp below would have the bounds 0 and -1, and let column -1 pass
        return torch.full_like(target, absent, dtype=torch.int32)
    column = target - start if start else target
    is_absent = column.clamp(0, end - start - 1) != column
    return column.masked_fill(is_absent, absent).to(torch.int32)


def index_of(column: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Columns as an index for `gather`; ids of other ranks become 0, and the caller masks or replaces their entries."""
    return column.clamp_min(0).long()


def shifted_logits(z: Float[Tensor, "*n"], row_max: Float[Tensor, "*#n"], temperature: float) -> Float[Tensor, "*n"]:
    """Shifted logits (z - m) / temperature, for z in float32 or wider."""
    difference = z - row_max
    return difference if temperature == 1.0 else difference.div_(temperature)


def minus_row_max(
    block: Float[Tensor, "n v"], row_max: Float[Tensor, "n 1"], out: Float[Tensor, "n v"] | None = None
) -> Float[Tensor, "n v"]:
    """z - m of a block, before dividing by the temperature, in the dtype of m; in `out` if given and of that dtype."""
    if block.dtype != row_max.dtype:
        return block.to(row_max.dtype).sub_(row_max)
    if out is None or torch.compiler.is_compiling():
        return block - row_max
    return torch.sub(block, row_max, out=out)


def shifted_logits_base_2(
    block: Float[Tensor, "n v"],
    row_max: Float[Tensor, "n 1"],
    temperature: float,
    out: Float[Tensor, "n v"] | None = None,
) -> Float[Tensor, "n v"]:
    """Shifted logits in base 2, log2(e) (z - m) / temperature, in float32 or wider.

    Their exp2 are the terms of the softmax. On a CPU exp2 takes a quarter of the time of exp, and the temperature is
    part of the same factor.
    """
    return minus_row_max(block, row_max, out).mul_(LOG2_E / temperature)


def local_statistics(
    block: Float[Tensor, "n v"], column: Int[Tensor, "n k"] | None, temperature: float, with_entropy: bool
) -> Float[Tensor, "f n"]:
    """The f statistics of each row, in this order: m_r, R_r, the z_t of all k ids if there are ids, d_r with entropy.

    `column` has the columns of each row's k ids; negative if this rank does not have the id.
    """
    if block.shape[-1] == 0:
        return _statistics_of_no_columns(block, column, with_entropy)
    # 1. m_r, R_r and, with entropy, the sum of the terms times their shifted logits.
    row_max, row_sum_m1, weighted_sum = _row_sums(block, temperature, with_entropy)
    numbers = [row_max, row_sum_m1]
    # 2. The logits at the ids.
    if column is not None:
        z_t = block.gather(-1, index_of(column)).to(row_sum_m1.dtype)
        # +inf says that this rank does not have the id. A logit of +inf has no log-probability: NaN.
        numbers.append(z_t.masked_fill_(z_t == math.inf, math.nan).masked_fill_(column < 0, math.inf))
    # 3. d_r, converted from base 2 to base e.
    if weighted_sum is not None:
        numbers.append(weighted_sum / (LOG2_E * (1.0 + row_sum_m1)))
    return torch.cat(numbers, dim=-1).mT


def _row_sums(
    block: Float[Tensor, "n v"], temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """m_r, R_r and, with entropy, the sum of exp(b_v) b_v log2(e), each [n, 1]."""
    if long_rows.applies_to(block):
        return long_rows.row_sums(block, temperature, with_entropy)
    terms_of = _compiled_terms if torch.compiler.is_compiling() else _eager_terms
    row_max, row_sum_m1, shifted, terms = terms_of(block.to(accumulator(block.dtype)), temperature, with_entropy)
    # The term of the largest logit was set to 0; its product with its shifted logit, 0, would be 0 anyway.
    weighted_sum = terms.mul_(with_floor(shifted)).sum(-1, keepdim=True) if with_entropy else None
    return row_max, row_sum_m1, weighted_sum


def _eager_terms(wide: Float[Tensor, "n v"], temperature: float, keeps_shifted: bool) -> tuple[Tensor, ...]:
    """(m_r, R_r, shifted logits in base 2, terms) of a block; the term of one largest logit is set to 0."""
    row_max, row_max_column = wide.max(-1, keepdim=True)
    shifted = shifted_logits_base_2(wide, long_rows.finite_shift(row_max), temperature)
    del wide  # free this block before `terms` is allocated
    terms = shifted.exp2() if keeps_shifted else shifted.exp2_()
    return row_max, terms.scatter_(-1, row_max_column, 0.0).sum(-1, keepdim=True), shifted, terms


def _compiled_terms(wide: Float[Tensor, "n v"], temperature: float, keeps_shifted: bool) -> tuple[Tensor, ...]:
    """`_eager_terms` for the compiler, which fuses it into two passes; an argmax and a scatter would add passes.

    The terms of all columns with the largest logit are set to 0. Each of these terms is 1, so their number minus one is
    added to the sum.
    """
    row_max = wide.amax(-1, keepdim=True)
    is_row_max = wide == row_max
    shifted = shifted_logits_base_2(wide, long_rows.finite_shift(row_max), temperature)
    terms = shifted.exp2().masked_fill(is_row_max, 0.0)
    tie_count = (is_row_max.to(terms.dtype).sum(-1, keepdim=True) - 1.0).masked_fill(row_max == -math.inf, 0.0)
    return row_max, terms.sum(-1, keepdim=True) + tie_count, shifted, terms


def local_cross_mean(
    q_block: Float[Tensor, "n v"],
    p_block: Float[Tensor, "n v"],
    row_max_q: Float[Tensor, " n"],
    row_max_p: Float[Tensor, " n"],
    row_sum_m1_p: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """x_r: the mean of q's shifted logits under p's local softmax; 0 for an empty shard."""
    row_max_q, row_max_p = (torch.where(m.isfinite(), m, 0.0).unsqueeze(-1) for m in (row_max_q, row_max_p))
    shifted, terms = minus_row_max(q_block, row_max_q), minus_row_max(p_block, row_max_p).exp_()
    masked = shifted == -math.inf
    cross_mean = terms.mul_(shifted.masked_fill_(masked, 0.0)).sum(-1) / (1.0 + row_sum_m1_p)
    # Test the logits, not p: p may underflow to 0 in float32 but not in float64, and the two dtypes would disagree.
    is_impossible = (masked & (p_block > -math.inf)).any(-1)
    return torch.where(is_impossible, -math.inf, cross_mean)


def gather_statistics(statistics: Float[Tensor, "f n"], group: ProcessGroup | None) -> Float[Tensor, "r f n"]:
    """The statistics of every rank, in rank order: one all_gather, or none if one rank has full rows."""
    return statistics.unsqueeze(0) if group is None else all_gather_stack(statistics, group)


def by_name(stack: Float[Tensor, "r f n"], id_count: int | None, with_entropy: bool) -> RankStatistics:
    """Views of the stacked results of `local_statistics`, by name."""
    z_t_r = None if id_count is None else stack.narrow(1, 2, id_count)
    return RankStatistics(stack.select(1, 0), stack.select(1, 1), z_t_r, stack.select(1, -1) if with_entropy else None)


def global_normaliser(
    row_max_r: Float[Tensor, "r ..."], row_sum_m1_r: Float[Tensor, "r ..."], temperature: float
) -> Normaliser:
    """m and log(1 + R) of full rows."""
    if row_max_r.shape[0] == 1:
        row_max = row_max_r[0].clone()  # it is saved for backward, and a view would keep the stack alive
        return Normaliser(row_max, _zero_or_nan(row_max).add_(row_sum_m1_r[0]).log1p_())
    row_max, row_sum_m1, _ = global_row_sum_m1(row_max_r, row_sum_m1_r, temperature)
    return Normaliser(row_max, row_sum_m1.log1p())


def global_row_sum_m1(
    row_max_r: Float[Tensor, "r ..."], row_sum_m1_r: Float[Tensor, "r ..."], temperature: float
) -> tuple[Float[Tensor, "*a"], Float[Tensor, "*a"], Int[Tensor, "*a"]]:
    """(m, R, rank): m = max_r m_r,   R = sum_r w_r (1 + R_r) - 1,   w_r = exp((m_r - m) / temperature).

    `rank` is the first rank with m_r = m, so its w_r is 1, and R leaves out this 1. It is set to 0 before the sum,
    R = sum_r (w_r [r != rank] + w_r R_r); subtracting 1 after the sum would lose the digits of a small R.
    """
    row_max, first = row_max_r.max(0, keepdim=True)
    # A row may be -inf on every rank: the clamp makes its shift finite, since -inf - -inf is NaN.
    weight = shifted_logits(row_max_r, row_max.clamp_min(torch.finfo(row_max.dtype).min), temperature).exp()
    row_sum_m1 = torch.addcmul(weight.scatter(0, first, 0.0), weight, row_sum_m1_r).sum(0)
    return row_max.squeeze(0), row_sum_m1, first.squeeze(0)


def global_target_logit(z_t: Float[Tensor, "r ..."]) -> Float[Tensor, "*a"]:
    """The target's logit; +inf for an id outside the vocabulary."""
    return z_t[0] if z_t.shape[0] == 1 else z_t.amin(0)


def global_shifted_mean(
    row_max_r: Float[Tensor, "r ..."],
    row_sum_m1_r: Float[Tensor, "r ..."],
    shifted_mean_r: Float[Tensor, "r ..."],
    normaliser: Normaliser,
    temperature: float,
) -> Float[Tensor, "*a"]:
    """d = sum_v p_v b_v = sum_r w_r (d_r + a_r),   a_r = (m_r - m) / temperature,   w_r = the share of rank r."""
    shifted_max_r = shifted_logits(row_max_r, normaliser.row_max, temperature)
    weight = (shifted_max_r + (row_sum_m1_r.log1p() - normaliser.log_row_sum)).exp()
    # Selected, not multiplied: a rank of weight 0, such as a rank with only -inf, would give 0 * -inf = NaN.
    return torch.where(weight == 0, 0.0, weight * (shifted_mean_r + shifted_max_r)).sum(0)


def global_cross_mean(
    row_max_q: Float[Tensor, "r ..."],
    row_max_p: Float[Tensor, "r ..."],
    row_sum_m1_p: Float[Tensor, "r ..."],
    cross_mean_r: Float[Tensor, "r ..."],
    q: Normaliser,
    p: Normaliser,
) -> Float[Tensor, "*a"]:
    """x = sum_v p_v b^q_v = sum_r w_r (x_r + m^q_r - m^q),   w_r = the share of rank r in p; -inf stays."""
    shifted_mean = cross_mean_r + (row_max_q - q.row_max)
    weight = ((row_max_p - p.row_max) + (row_sum_m1_p.log1p() - p.log_row_sum)).exp()
    # If p > 0 and q = 0 in some column, the mean is -inf even if this rank's share of p underflows to 0.
    of_no_weight = torch.where((shifted_mean == -math.inf) & (row_max_p > -math.inf), -math.inf, 0.0)
    return torch.where(weight == 0, of_no_weight, weight * shifted_mean).sum(0)


def logprob_of(z_t: Float[Tensor, "*a"], normaliser: Normaliser, temperature: float) -> Float[Tensor, "*a"]:
    """log p[t]; NaN if the row has NaN or +inf, or only -inf; 0 for an id outside the vocabulary, in any row."""
    score = shifted_logits(z_t, normaliser.row_max, temperature).sub_(normaliser.log_row_sum)
    return zero_outside_vocabulary(z_t, score)


def zero_outside_vocabulary(z_t: Float[Tensor, "*a"], score: Float[Tensor, "*a"]) -> Float[Tensor, "*a"]:
    """Set the score of an id outside the vocabulary to 0, in place, since a row of padding may be NaN."""
    return score.masked_fill_(z_t == math.inf, 0.0)


def _zero_or_nan(row_max: Float[Tensor, "*a"]) -> Float[Tensor, "*a"]:
    """0, or NaN if the row's largest logit is NaN or +inf, since such a row has no softmax."""
    return row_max.clamp_min(0.0).mul_(0.0)


def with_floor(shifted: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """Clamp shifted logits in base 2 to a finite floor, so that 0 log 0 is 0; in place."""
    return shifted.clamp_min_(LOWEST_SHIFTED)


def without_minus_infinity(shifted: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """Clamp shifted logits to a finite floor far below any logit; in place."""
    return shifted.clamp_min_(torch.finfo(shifted.dtype).min)


def _statistics_of_no_columns(block: Tensor, column: Tensor | None, with_entropy: bool) -> Tensor:
    neutral = [-math.inf, 0.0] + [math.inf] * (0 if column is None else column.shape[-1]) + [0.0] * with_entropy
    rows = torch.tensor(neutral, dtype=accumulator(block.dtype), device=block.device)
    return rows.unsqueeze(-1).expand(-1, len(block))
