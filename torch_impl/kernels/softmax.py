"""Triton kernels of the softmax: statistics of one rank's columns, and the gradient of log-probability and entropy.

Statistics: a program reads one row, some columns at a time, and updates

    m = max_v z_v      R = sum_v exp(b_v) - 1      D = sum_v exp(b_v) b_v      b_v = (z_v - m) / temperature

which it rescales to the new maximum at each step: R is all terms but one largest, which is 1. The eager equivalent is
`vocab_parallel.statistics.local_statistics`, which also says what the results mean.

Gradient, of log-probability and negative entropy together, in one read and one write: a program computes some columns
of one row; where several ids of a row are looked up, a second, small kernel writes the gradient at those. The eager
equivalent is `vocab_parallel.fused_logprob.write_gradient`, which also states the formula.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator

STATISTICS_STEP = 4096  # columns that a program of the statistics reads at a time
GRADIENT_STEP = 2048  # columns of a program of the gradient
WARPS = 8
IDS = 64  # ids that a program takes at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a finite floor for shifted logits, so that 0 log 0 is 0
ON_ANOTHER_RANK = tl.constexpr(-1)  # -1 is an id of another rank, a lower column an out-of-vocabulary id


def local_statistics(
    block: Float[Tensor, "n v"],
    column: Int[Tensor, "n k"] | None,
    temperature: float,
    with_entropy: bool,
    step: int = STATISTICS_STEP,
) -> Float[Tensor, "f n"]:
    """Rows m and R, then k rows z_t if there are columns (+inf where one is below 0), then D / (1 + R) with entropy."""
    n, v = block.shape
    k = 0 if column is None else column.shape[-1]
    out = torch.empty(2 + k + with_entropy, n, dtype=accumulator(block.dtype), device=block.device)
    if not n:  # a grid of no programs
        return out
    # The temperature is a tensor: Triton passes Python floats as float32, also where the logits are float64.
    with torch.cuda.device_of(block):
        _statistics[(n,)](
            block,
            out if column is None else column.contiguous(),
            torch.full((1,), temperature, dtype=out.dtype, device=out.device),
            out,
            n,
            v,
            k,
            (2 + k) * n,
            *block.stride(),
            HAS_TEMP=temperature != 1.0,
            WITH_ENTROPY=with_entropy,
            STEP=min(step, triton.next_power_of_2(max(v, 1))),
            IDS=min(IDS, triton.next_power_of_2(k)) if k else 0,
            num_warps=WARPS,
        )
    return out


@triton.jit
def _statistics(
    logits,
    ids,
    temperature,
    out,
    n,
    v,
    k,
    entropy_at,
    row_stride,
    column_stride,
    HAS_TEMP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    STEP: tl.constexpr,
    IDS: tl.constexpr,
):
    # 1. One row, read once, with the running maximum m, R and D of the blocks so far.
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * row_stride
    temp = tl.load(temperature)
    largest = tl.full((), float("-inf"), temp.dtype)
    rest = tl.zeros((), temp.dtype)
    shifted_mean = tl.zeros((), temp.dtype)
    for start in range(0, v, STEP):
        columns = start + tl.arange(0, STEP)
        z = tl.load(of_row + columns.to(tl.int64) * column_stride, mask=columns < v, other=float("-inf"))
        z = z.to(temp.dtype)
        # 2. The new maximum; logits of this block, and the old maximum, less it.
        top = tl.maximum(largest, tl.max(z, 0))
        shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)  # a row of -inf: -inf - -inf would be NaN
        shifted = z - shift
        above = largest - shift
        if HAS_TEMP:
            shifted = shifted / temp
            above = above / temp
        # 3. Terms of this block; `weight` rescales the sums of the blocks before it.
        terms = tl.exp(shifted)
        weight = tl.exp(above)
        tied = tl.sum(tl.where(z == top, terms, 0.0), 0)
        below_top = tl.sum(tl.where(z == top, 0.0, terms), 0)
        if WITH_ENTROPY:
            lowered = tl.where(weight > 0.0, above, 0.0)  # 0 * -inf is NaN
            of_block = tl.sum(terms * tl.maximum(shifted, LOWEST), 0)
            shifted_mean = weight * (shifted_mean + (1.0 + rest) * lowered) + of_block
        # The 1 that was left out counts for its weight once another term is the largest.
        rest = weight * rest + below_top + tl.where(top > largest, (tied - 1.0) + weight, tied)
        largest = top
    # A maximum passes over NaN; the sum does not.
    largest = tl.where((rest != rest) & (largest < float("inf")), float("nan"), largest)
    # 4. Store m and R, the logits at the ids of this rank, and the mean shifted logit.
    tl.store(out + row, largest)
    tl.store(out + n + row, rest)
    if IDS > 0:
        for first in range(0, k, IDS):
            slot = first + tl.arange(0, IDS)
            column = tl.load(ids + row * k + slot, mask=slot < k, other=-1).to(tl.int64)
            z_t = tl.load(of_row + column * column_stride, mask=column >= 0, other=float("inf"))
            tl.store(out + (2 + slot.to(tl.int64)) * n + row, z_t.to(temp.dtype), mask=slot < k)
    if WITH_ENTROPY:
        tl.store(out + entropy_at + row, shifted_mean / (1.0 + rest))


class IdCotangents(Protocol):
    """`vocab_parallel.fused_logprob.IdCotangents`: columns that are looked up, and sums of their cotangents."""

    @property
    def column(self) -> Int[Tensor, "n k"]: ...
    @property
    def g_same(self) -> Float[Tensor, "n k"]: ...
    @property
    def g_other(self) -> Float[Tensor, "n k"] | None: ...
    @property
    def g_total(self) -> Float[Tensor, " n"]: ...


def write_gradient(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    normaliser: tuple[Float[Tensor, " n"], Float[Tensor, " n"]],
    at_ids: IdCotangents | None,
    entropy: tuple[Float[Tensor, " n"], Float[Tensor, " n"]] | None,
    temperature: float,
    normalised: bool,
    step: int = GRADIENT_STEP,
) -> None:
    """out = (sum_t g_t (1[v=t] - p) + g_h p (log p - h)) / temperature; out may be the block."""
    n, v = block.shape
    if not n or not v:  # a grid of no programs
        return
    # A kernel takes every pointer: `unread` stands for absent tensors, which the constexpr flags exclude.
    unread = largest = normaliser.largest
    k = 0 if at_ids is None else at_ids.column.shape[-1]
    column, g_same, total = (unread,) * 3 if at_ids is None else (at_ids.column, at_ids.g_same, at_ids.g_total)
    entropy_rows = (unread, unread) if entropy is None else entropy
    temp = torch.full((1,), temperature, dtype=largest.dtype, device=largest.device)
    of_rows = [x.contiguous() for x in (*normaliser, *entropy_rows, column, g_same)]
    settings = dict(HAS_TEMP=temperature != 1.0, IS_NORMALISED=normalised, WITH_ENTROPY=entropy is not None)
    width = min(step, triton.next_power_of_2(v))
    with torch.cuda.device_of(block):
        # Before the first kernel: `out` may be `block`, and the second kernel reads logits at the ids.
        looked_up = block.gather(-1, column.clamp_min(0).long()) if k > 1 else None
        _gradient[(n, triton.cdiv(v, width))](
            out,
            block,
            temp,
            *of_rows,
            total.contiguous(),
            v,
            k,
            *out.stride(),
            *block.stride(),
            STEP=width,
            IDS=min(IDS, triton.next_power_of_2(k)) if k else 0,
            num_warps=WARPS,
            **settings,
        )
        if at_ids is not None and at_ids.g_other is not None and looked_up is not None:
            width = min(IDS, triton.next_power_of_2(k))
            _gradient_at_ids[(n, triton.cdiv(k, width))](
                out, looked_up, temp, *of_rows, at_ids.g_other.contiguous(), k, *out.stride(), IDS=width, **settings
            )
    # Autograd does not see what a Triton kernel writes in place.
    torch.autograd.graph.increment_version(out)


@triton.jit
def _gradient(
    out,
    logits,
    temperature,
    largest,
    log_total,
    shifted_mean,
    g_entropy,
    ids,
    g_same,
    total,
    v,
    k,
    out_row_stride,
    out_column_stride,
    row_stride,
    column_stride,
    HAS_TEMP: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    STEP: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * STEP
    columns = start + tl.arange(0, STEP)
    inside = columns < v
    places = columns.to(tl.int64)
    temp = tl.load(temperature)
    z = tl.load(logits + row * row_stride + places * column_stride, mask=inside, other=float("-inf")).to(temp.dtype)
    log_p, d_entropy = _log_p_terms(z, row, temp, largest, log_total, shifted_mean, g_entropy, HAS_TEMP, WITH_ENTROPY)
    # 1. Log-probability: -p times the sum of cotangents; at a single id 1 - p, at several the second kernel writes.
    gradient = tl.zeros((STEP,), temp.dtype)
    if IDS > 0:
        if IS_NORMALISED:
            gradient = tl.exp(log_p) * -tl.load(total + row)
        if IDS == 1:
            column = tl.load(ids + row)
            if (column >= start) & (column < start + STEP):
                g = tl.load(g_same + row)
                at_id = tl.zeros((STEP,), temp.dtype) + g
                if IS_NORMALISED:
                    at_id = _one_minus_exp(log_p) * g
                gradient = tl.where(columns == column, at_id, gradient)
            out_of_vocabulary = column < ON_ANOTHER_RANK
        else:
            highest = tl.full((), -2147483648, tl.int32)  # no gradient if all ids are out of the vocabulary
            for first in range(0, k, IDS):
                slot = first + tl.arange(0, IDS)
                id_columns = tl.load(ids + row * k + slot, mask=slot < k, other=-2147483648)
                highest = tl.maximum(highest, tl.max(id_columns, 0))
            out_of_vocabulary = highest < ON_ANOTHER_RANK
        gradient = tl.where(out_of_vocabulary, 0.0, gradient)  # selected, since 0 * NaN is NaN
    # 2. Entropy, temperature, and one rounding to the dtype of the output.
    if WITH_ENTROPY:
        gradient += d_entropy
    if HAS_TEMP:
        gradient = gradient / temp
    written_to = out + row * out_row_stride + places * out_column_stride
    tl.store(written_to, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_at_ids(
    out,
    looked_up,
    temperature,
    largest,
    log_total,
    shifted_mean,
    g_entropy,
    ids,
    g_same,
    g_other,
    k,
    out_row_stride,
    out_column_stride,
    HAS_TEMP: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * IDS + tl.arange(0, IDS)
    at = row * k + slot
    temp = tl.load(temperature)
    column = tl.load(ids + at, mask=slot < k, other=-1).to(tl.int64)
    gradient = tl.load(g_same + at, mask=slot < k, other=0.0)
    z = tl.load(looked_up + at, mask=slot < k, other=float("-inf")).to(temp.dtype)
    log_p, d_entropy = _log_p_terms(z, row, temp, largest, log_total, shifted_mean, g_entropy, HAS_TEMP, WITH_ENTROPY)
    if IS_NORMALISED:
        # Cotangents of equal ids times 1 - p, those of the row's other ids times -p.
        from_other_ids = tl.exp(log_p) * tl.load(g_other + at, mask=slot < k, other=0.0)
        gradient = _one_minus_exp(log_p) * gradient - from_other_ids
    if WITH_ENTROPY:
        gradient += d_entropy
    if HAS_TEMP:
        gradient = gradient / temp
    # Equal ids write equal numbers, in whatever order.
    written_to = out + row * out_row_stride + column * out_column_stride
    tl.store(written_to, gradient.to(out.dtype.element_ty), mask=column >= 0)


@triton.jit
def _log_p_terms(
    z, row, temp, largest, log_total, shifted_mean, g_entropy, HAS_TEMP: tl.constexpr, WITH_ENTROPY: tl.constexpr
):
    """(log p, the entropy's part of the gradient) at some logits of a row."""
    shifted = z - tl.load(largest + row)
    if HAS_TEMP:
        shifted = shifted / temp
    log_p = shifted - tl.load(log_total + row)
    entropy_term = tl.zeros_like(z)
    if WITH_ENTROPY:
        g = tl.load(g_entropy + row)
        entropy_term = tl.exp(log_p) * (tl.maximum(shifted, LOWEST) - tl.load(shifted_mean + row)) * g
        entropy_term = tl.where(g == 0.0, 0.0, entropy_term)  # selected, since 0 * NaN is NaN
    return log_p, entropy_term


@triton.jit
def _one_minus_exp(x):
    """-expm1(x) of x <= 0: the power series where 1 - exp(x) would cancel, to the last digit of float64."""
    series = tl.zeros_like(x) + 1.0
    for i in tl.static_range(15):
        series = 1.0 + series * x / (16 - i)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))
