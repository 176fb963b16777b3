"""Triton kernels of the softmax: statistics of one rank's columns, and the gradient of log-probability and entropy.

Statistics: a program reads one row once, STEP columns at a time, and computes

    m = max_v z_v      R = sum_v exp(b_v) - 1      D = sum_v exp(b_v) b_v      b_v = (z_v - m) / temperature

R is all terms but one largest, which is 1. Each of the program's STEP lanes has the three of its own columns, one in
every step, and rescales them to its own maximum; the lanes are merged at the end of the row. A maximum over all lanes
in every step made a program wait for it: on an H100 4096 bfloat16 rows of 131,072 columns took 0.49 ms, and 0.37 ms
without, where half a copy of them takes 0.36 ms. The eager equivalent is `vocab_parallel.statistics.local_statistics`,
which also says what the results mean.

Gradient, of log-probability and negative entropy together, in one read and one write: a program computes some columns
of one row; where several ids of a row are looked up, a second, small kernel writes the gradient at those. The eager
equivalent is `vocab_parallel.fused_logprob.write_gradient`, which also states the formula. Its steps have the same
numbers here, except for the entropy and the temperature, which are in its steps 2 and 3 and here in step 5; rows that
are set to 0 in its step 4 are so here by ids in step 4 and by the entropy in step 5.

Names in the kernels, after Triton's tutorials. `x_ptr` points to the first element of a tensor; what is no pointer and
no constexpr is an integer. n rows, v columns, k ids of each row; the dtype is float32 or float64 unless a line says so.

    logits_ptr         [n, v]  the logits z, in any dtype and strides (row_stride, column_stride)
    out_ptr            what is written: statistics [f, n], contiguous; or the gradient [n, v], in any dtype and strides
    temperature        a float64 by its annotation, since Triton passes other Python floats as float32
    column_ptr         [n, k]  int32 columns of the ids in this shard; -1: on another rank, below: out of the vocabulary
    z_t_ptr            [n, k]  the logits at the ids, in the dtype of the logits
    row_max_ptr        [n]     m
    log_row_sum_ptr    [n]     log(1 + R)
    shifted_mean_ptr   [n]     d = D / (1 + R)
    g_entropy_ptr      [n]     cotangent of the negative entropy
    g_total_ptr        [n]     cotangents of a row's k ids, summed
    g_same_ptr         [n, k]  those of the ids equal to this one, summed
    g_other_ptr        [n, k]  those of the row's other ids, summed

    HAS_TEMPERATURE, WITH_ENTROPY, IS_NORMALISED   as in the eager functions: what a specialisation may leave out
    STEP, IDS                                      columns, and ids, that a program takes at a time; IDS 0: no ids
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator

# Of some forty settings the fastest on an H100, of 4096 bfloat16 rows of 131,072 columns.
STATISTICS_STEP, STATISTICS_WARPS = 2048, 16  # columns that a program of the statistics reads at a time
STATISTICS_UNROLL = tl.constexpr(4)  # steps whose columns are loaded before the first of them is used
GRADIENT_STEP, GRADIENT_WARPS = 1024, 2  # columns of a program of the gradient
IDS = 64  # ids that a program takes at a time
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a finite floor for shifted logits, so that 0 log 0 is 0
ON_ANOTHER_RANK = tl.constexpr(-1)  # -1 is an id of another rank, a lower column an out-of-vocabulary id


def local_statistics(
    block: Float[Tensor, "n v"],
    column: Int[Tensor, "n k"] | None,
    temperature: float,
    with_entropy: bool,
    step: int = STATISTICS_STEP,
) -> Float[Tensor, "f n"]:
    """The statistics of the rows, one after another: m, R, k times z_t if there are columns (+inf where one is
    negative), D / (1 + R) with entropy."""
    n, v = block.shape
    k = 0 if column is None else column.shape[-1]
    out = torch.empty(2 + k + with_entropy, n, dtype=accumulator(block.dtype), device=block.device)
    if not n:  # a grid of no programs
        return out
    with torch.cuda.device_of(block):
        _statistics[(n,)](
            block,
            out if column is None else column.contiguous(),
            out,
            n,
            v,
            k,
            (2 + k) * n,
            *block.stride(),
            temperature,
            WITH_ENTROPY=with_entropy,
            STEP=min(step, triton.next_power_of_2(max(v, 1))),
            IDS=min(IDS, triton.next_power_of_2(k)) if k else 0,
            num_warps=STATISTICS_WARPS,
        )
    return out


@triton.jit
def _statistics(
    logits_ptr,
    column_ptr,
    out_ptr,
    n,
    v,
    k,
    entropy_offset,
    row_stride,
    column_stride,
    temperature: tl.float64,
    WITH_ENTROPY: tl.constexpr,
    STEP: tl.constexpr,
    IDS: tl.constexpr,
):
    # 1. One row, read once. A lane has m, R and D of its own columns so far, b and D in base 2.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    dtype = out_ptr.dtype.element_ty
    to_base_2 = LOG2_E / tl.full((), temperature, dtype)
    lanes = tl.arange(0, STEP)
    lane_max = tl.full((STEP,), float("-inf"), dtype)
    lane_sum_m1, lane_shifted_sum = tl.zeros((STEP,), dtype), tl.zeros((STEP,), dtype)
    for start in tl.range(0, v, STEP, loop_unroll_factor=STATISTICS_UNROLL):
        columns = start + lanes
        z = tl.load(row_ptr + columns.to(tl.int64) * column_stride, mask=columns < v, other=float("-inf")).to(dtype)
        # 2. The smaller of z and the maximum so far, shifted by the larger: `term` is that of z, or where z is the new
        #    maximum the weight of the terms before it. Equal ones are selected, since -inf - -inf is NaN.
        is_new_max = z > lane_max
        shifted = tl.where(z == lane_max, 0.0, -tl.abs(z - lane_max)) * to_base_2
        term = tl.exp2(shifted)
        # 3. The terms before are the 1 that was left out, and R; now the 1 of z is left out. A lane that has seen but
        #    -inf has counted these as equal, which its weight of 0 undoes.
        weight = tl.where(is_new_max, term, 1.0)
        lane_sum_m1 = weight * lane_sum_m1 + term
        if WITH_ENTROPY:
            shifted_terms = tl.where(is_new_max, lane_sum_m1, term)  # those whose b is `shifted`, or lower by that
            lane_shifted_sum = weight * lane_shifted_sum + shifted_terms * tl.maximum(shifted, LOWEST)
        lane_max = tl.where(is_new_max, z, lane_max)
    # 4. Of the lanes those of the row.
    row_max, row_sum_m1, shifted_sum = _of_lanes(lane_max, lane_sum_m1, lane_shifted_sum, to_base_2, lanes, STEP)
    # 5. Store m, NaN where R is, since a maximum passes over NaN; R; the logits at the ids; the mean shifted logit.
    row_max = tl.where((row_sum_m1 != row_sum_m1) & (row_max < float("inf")), float("nan"), row_max)
    tl.store(out_ptr + row, row_max)
    tl.store(out_ptr + n + row, row_sum_m1)
    if IDS > 0:
        for first_id in range(0, k, IDS):
            index = first_id + tl.arange(0, IDS)
            column = tl.load(column_ptr + row * k + index, mask=index < k, other=-1).to(tl.int64)
            z_t = tl.load(row_ptr + column * column_stride, mask=column >= 0, other=float("inf")).to(dtype)
            z_t = tl.where((column >= 0) & (z_t == float("inf")), float("nan"), z_t)  # a logit of +inf; see statistics
            tl.store(out_ptr + (2 + index.to(tl.int64)) * n + row, z_t, mask=index < k)
    if WITH_ENTROPY:
        tl.store(out_ptr + entropy_offset + row, shifted_sum / (LOG2_E * (1.0 + row_sum_m1)))


@triton.jit
def _of_lanes(lane_max, lane_sum_m1, lane_shifted_sum, to_base_2, lanes, STEP: tl.constexpr):
    """m, R and D of a row from those of its lanes, by their weights: R leaves out the 1 of the first that has m."""
    row_max = tl.max(lane_max, 0)
    finite_max = tl.where(tl.abs(row_max) < float("inf"), row_max, 0.0)  # a row of -inf: -inf - -inf would be NaN
    lane_shift = (lane_max - finite_max) * to_base_2
    lane_weight = tl.exp2(lane_shift)
    first = tl.min(tl.where(lane_max == row_max, lanes, STEP), 0)
    row_sum_m1 = tl.sum(lane_weight * lane_sum_m1 + tl.where(lanes == first, 0.0, lane_weight), 0)
    lane_sum = lane_weight * (lane_shifted_sum + (1.0 + lane_sum_m1) * lane_shift)
    return row_max, row_sum_m1, tl.sum(tl.where(lane_weight > 0.0, lane_sum, 0.0), 0)  # 0 * -inf is NaN


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
    """out = (sum_t g_t (1[v=t] - p) + g_h p (log p - h)) / temperature; out may be the block. Steps as above."""
    n, v = block.shape
    if not n or not v:  # a grid of no programs
        return
    # A kernel takes every pointer: `unread` is passed for absent tensors, which the constexpr flags exclude.
    unread = normaliser.row_max
    k = 0 if at_ids is None else at_ids.column.shape[-1]
    column, g_same, g_total = (unread,) * 3 if at_ids is None else (at_ids.column, at_ids.g_same, at_ids.g_total)
    entropy_rows = (unread, unread) if entropy is None else entropy
    row_inputs = [x.contiguous() for x in (*normaliser, *entropy_rows, column, g_same)]
    settings = dict(HAS_TEMPERATURE=temperature != 1.0, IS_NORMALISED=normalised, WITH_ENTROPY=entropy is not None)
    width = min(step, triton.next_power_of_2(v))
    with torch.cuda.device_of(block):
        # 1. The logits at the ids, while they are still there: `out` may be `block`, and the second kernel reads them.
        z_t = block.gather(-1, column.clamp_min(0).long()) if k > 1 else None
        # 2. to 5. Every column, and a single id of a row.
        _gradient[(n, triton.cdiv(v, width))](
            out,
            block,
            *row_inputs,
            g_total.contiguous(),
            v,
            k,
            *out.stride(),
            *block.stride(),
            temperature,
            STEP=width,
            IDS=min(IDS, triton.next_power_of_2(k)) if k else 0,
            num_warps=GRADIENT_WARPS,
            **settings,
        )
        # 3. and 5. again, for several ids of a row.
        if at_ids is not None and at_ids.g_other is not None and z_t is not None:
            width = min(IDS, triton.next_power_of_2(k))
            g_other = at_ids.g_other.contiguous()
            _gradient_at_ids[(n, triton.cdiv(k, width))](
                out, z_t, *row_inputs, g_other, k, *out.stride(), temperature, IDS=width, **settings
            )
    # Autograd does not see what a Triton kernel writes in place.
    torch.autograd.graph.increment_version(out)


@triton.jit
def _gradient(
    out_ptr,
    logits_ptr,
    row_max_ptr,
    log_row_sum_ptr,
    shifted_mean_ptr,
    g_entropy_ptr,
    column_ptr,
    g_same_ptr,
    g_total_ptr,
    v,
    k,
    out_row_stride,
    out_column_stride,
    row_stride,
    column_stride,
    temperature: tl.float64,
    HAS_TEMPERATURE: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    STEP: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * STEP
    columns = start + tl.arange(0, STEP)
    in_row = columns < v
    columns_64 = columns.to(tl.int64)
    temperature = tl.full((), temperature, row_max_ptr.dtype.element_ty)
    z_ptr = logits_ptr + row * row_stride + columns_64 * column_stride
    z = tl.load(z_ptr, mask=in_row, other=float("-inf")).to(temperature.dtype)
    shifted = _shifted_logits(z, row, temperature, row_max_ptr, HAS_TEMPERATURE)
    log_p = shifted - tl.load(log_row_sum_ptr + row)
    # 2. The gradient of the log-probability at every column, as if it were no id's: -p times the sum of cotangents.
    gradient = tl.zeros((STEP,), temperature.dtype)
    if IDS > 0:
        if IS_NORMALISED:
            gradient = tl.exp(log_p) * -tl.load(g_total_ptr + row)
        # 3. At a single id 1 - p; at several the second kernel writes.
        if IDS == 1:
            column = tl.load(column_ptr + row)
            if (column >= start) & (column < start + STEP):
                g = tl.load(g_same_ptr + row)
                at_id = tl.zeros((STEP,), temperature.dtype) + g
                if IS_NORMALISED:
                    at_id = _one_minus_exp(log_p) * g
                gradient = tl.where(columns == column, at_id, gradient)
            out_of_vocabulary = column < ON_ANOTHER_RANK
        else:
            out_of_vocabulary = _largest_column(column_ptr, row, k, IDS) < ON_ANOTHER_RANK
        # 4. Rows that look up out-of-vocabulary ids alone. Selected, since 0 * NaN is NaN.
        gradient = tl.where(out_of_vocabulary, 0.0, gradient)
    # 5. The entropy; the temperature; one rounding to the dtype of the output.
    if WITH_ENTROPY:
        gradient += _entropy_gradient(shifted, log_p, row, shifted_mean_ptr, g_entropy_ptr)
    if HAS_TEMPERATURE:
        gradient = gradient / temperature
    gradient_ptr = out_ptr + row * out_row_stride + columns_64 * out_column_stride
    tl.store(gradient_ptr, gradient.to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def _largest_column(column_ptr, row, k, IDS: tl.constexpr):
    """The largest column of a row's k ids: below ON_ANOTHER_RANK if all are out of the vocabulary."""
    largest = tl.full((), -2147483648, tl.int32)
    for first in range(0, k, IDS):
        index = first + tl.arange(0, IDS)
        column = tl.load(column_ptr + row * k + index, mask=index < k, other=-2147483648)
        largest = tl.maximum(largest, tl.max(column, 0))
    return largest


@triton.jit
def _gradient_at_ids(
    out_ptr,
    z_t_ptr,
    row_max_ptr,
    log_row_sum_ptr,
    shifted_mean_ptr,
    g_entropy_ptr,
    column_ptr,
    g_same_ptr,
    g_other_ptr,
    k,
    out_row_stride,
    out_column_stride,
    temperature: tl.float64,
    HAS_TEMPERATURE: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * IDS + tl.arange(0, IDS)
    offset = row * k + index
    temperature = tl.full((), temperature, row_max_ptr.dtype.element_ty)
    column = tl.load(column_ptr + offset, mask=index < k, other=-1).to(tl.int64)
    gradient = tl.load(g_same_ptr + offset, mask=index < k, other=0.0)
    z_t = tl.load(z_t_ptr + offset, mask=index < k, other=float("-inf")).to(temperature.dtype)
    shifted = _shifted_logits(z_t, row, temperature, row_max_ptr, HAS_TEMPERATURE)
    log_p = shifted - tl.load(log_row_sum_ptr + row)
    # 3. Cotangents of equal ids times 1 - p, those of the row's other ids times -p.
    if IS_NORMALISED:
        from_other_ids = tl.exp(log_p) * tl.load(g_other_ptr + offset, mask=index < k, other=0.0)
        gradient = _one_minus_exp(log_p) * gradient - from_other_ids
    # 5. The entropy, the temperature, one rounding. Equal ids write equal numbers, in whatever order.
    if WITH_ENTROPY:
        gradient += _entropy_gradient(shifted, log_p, row, shifted_mean_ptr, g_entropy_ptr)
    if HAS_TEMPERATURE:
        gradient = gradient / temperature
    gradient_ptr = out_ptr + row * out_row_stride + column * out_column_stride
    tl.store(gradient_ptr, gradient.to(out_ptr.dtype.element_ty), mask=column >= 0)


@triton.jit
def _shifted_logits(z, row, temperature, row_max_ptr, HAS_TEMPERATURE: tl.constexpr):
    """Shifted logits (z - m) / temperature, of some logits of a row."""
    shifted = z - tl.load(row_max_ptr + row)
    if HAS_TEMPERATURE:
        shifted = shifted / temperature
    return shifted


@triton.jit
def _entropy_gradient(shifted, log_p, row, shifted_mean_ptr, g_entropy_ptr):
    """g_h p (log p - h), the gradient of the entropy at some logits of a row, before the temperature."""
    g = tl.load(g_entropy_ptr + row)
    relative = tl.maximum(shifted, LOWEST) - tl.load(shifted_mean_ptr + row)  # log p - h
    return tl.where(g == 0.0, 0.0, tl.exp(log_p) * relative * g)  # selected, since 0 * NaN is NaN


@triton.jit
def _one_minus_exp(x):
    """-expm1(x) of x <= 0: the power series where 1 - exp(x) would cancel, to the last digit of float64."""
    series = tl.zeros_like(x) + 1.0
    for i in tl.static_range(15):
        series = 1.0 + series * x / (16 - i)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))
