"""Triton kernels of the softmax: statistics of one rank's columns, and the gradient of log-probability and entropy.

Statistics: a program reads one row once, STEP columns at a time, and computes

    m = max_v z_v      R = sum_v exp(b_v) - 1      D = sum_v exp(b_v) b_v      b_v = (z_v - m) / temperature

R leaves out the 1 of one largest logit. A program has STEP lanes. Each lane reads one column per step, computes m, R
and D of its columns relative to its own maximum, and the lanes are merged at the end of the row. With a maximum over
all lanes in every step, each step waited for it: on an H100 4096 bfloat16 rows of 131,072 columns took 0.49 ms, and
0.37 ms with separate lanes; half a copy of them takes 0.36 ms. The eager equivalent is
`vocab_parallel.statistics.local_statistics`, which also explains the results.

Gradient, of log-probability and negative entropy together, in one read and one write: a program computes some columns
of one row. If a row looks up several ids, a second, small kernel writes the gradient at these ids. The eager
equivalent is `vocab_parallel.fused_logprob.write_gradient`, which also states the formula. Its steps have the same
numbers here, with two exceptions. Entropy and temperature belong to its steps 2 and 3, and here to step 5. Rows that it
sets to 0 in step 4 are set to 0 here in step 4 for the ids and in step 5 for the entropy.

Names in the kernels, after Triton's tutorials. `x_ptr` points to the first element of a tensor; all arguments without
`_ptr` that are not constexpr are integers. There are n rows, v columns, and k ids per row; dtypes are float32 or
float64 unless a line says otherwise.

    logits_ptr         [n, v]  the logits z, in any dtype and strides (row_stride, column_stride)
    out_ptr            the result: statistics [f, n], contiguous; or the gradient [n, v], in any dtype and strides
    temperature        a float64 by its annotation, since Triton passes other Python floats as float32
    column_ptr         [n, k]  int32 columns of the ids in this shard; -1 on another rank, below -1 out of vocabulary
    z_t_ptr            [n, k]  the logits at the ids, in the dtype of the logits
    row_max_ptr        [n]     m
    log_row_sum_ptr    [n]     log(1 + R)
    shifted_mean_ptr   [n]     d = D / (1 + R)
    g_entropy_ptr      [n]     cotangent of the negative entropy
    g_total_ptr        [n]     sum of the cotangents of a row's k ids
    g_same_ptr         [n, k]  sum of the cotangents of the row's ids equal to this one
    g_other_ptr        [n, k]  sum of the cotangents of the row's other ids

    HAS_TEMPERATURE, WITH_ENTROPY, IS_NORMALISED   as in the eager functions; a specialisation omits the code of False
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

# The fastest of some forty settings on an H100, for 4096 bfloat16 rows of 131,072 columns.
STATISTICS_STEP, STATISTICS_WARPS = 2048, 16  # columns that a program of the statistics reads at a time
STATISTICS_UNROLL = tl.constexpr(4)  # number of steps that load their columns before the first step uses them
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
    """The statistics of each row: m, R, k times z_t if there are ids (+inf for a negative column), D / (1 + R) with
    entropy."""
    n, v = block.shape
    k = 0 if column is None else column.shape[-1]
    out = torch.empty(2 + k + with_entropy, n, dtype=accumulator(block.dtype), device=block.device)
    if not n:  # a grid must not be empty
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
    # 1. One row, read once. A lane has m, R and D of its columns so far; b and D are in base 2.
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
        # 2. The smaller of z and the maximum so far, shifted by the larger. `term` is the term of z, or if z is the new
        #    maximum, the weight of the earlier terms. Equal values are selected, since -inf - -inf is NaN.
        is_new_max = z > lane_max
        shifted = tl.where(z == lane_max, 0.0, -tl.abs(z - lane_max)) * to_base_2
        term = tl.exp2(shifted)
        # 3. If z is the new maximum, the earlier terms are R and the 1 that it leaves out; from now on R leaves out the
        #    1 of z. A lane with only -inf so far has counted these as equal; its weight of 0 removes them again.
        weight = tl.where(is_new_max, term, 1.0)
        lane_sum_m1 = weight * lane_sum_m1 + term
        if WITH_ENTROPY:
            shifted_terms = tl.where(is_new_max, lane_sum_m1, term)  # the terms whose b is `shifted` or drops by it
            lane_shifted_sum = weight * lane_shifted_sum + shifted_terms * tl.maximum(shifted, LOWEST)
        lane_max = tl.where(is_new_max, z, lane_max)
    # 4. Merge the lanes.
    row_max, row_sum_m1, shifted_sum = _of_lanes(lane_max, lane_sum_m1, lane_shifted_sum, to_base_2, lanes, STEP)
    # 5. Store m (NaN if R is NaN, since a maximum ignores NaN), R, the logits at the ids, and the mean shifted logit.
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
    """Merge the lanes' m, R and D into the row's, by weight; R leaves out the 1 of the first lane with maximum m."""
    row_max = tl.max(lane_max, 0)
    finite_max = tl.where(tl.abs(row_max) < float("inf"), row_max, 0.0)  # in a row of -inf, -inf - -inf would be NaN
    lane_shift = (lane_max - finite_max) * to_base_2
    lane_weight = tl.exp2(lane_shift)
    first = tl.min(tl.where(lane_max == row_max, lanes, STEP), 0)
    row_sum_m1 = tl.sum(lane_weight * lane_sum_m1 + tl.where(lanes == first, 0.0, lane_weight), 0)
    lane_sum = lane_weight * (lane_shifted_sum + (1.0 + lane_sum_m1) * lane_shift)
    return row_max, row_sum_m1, tl.sum(tl.where(lane_weight > 0.0, lane_sum, 0.0), 0)  # 0 * -inf is NaN


class IdCotangents(Protocol):
    """The fields of `vocab_parallel.fused_logprob.IdCotangents`: the ids' columns, and sums of their cotangents."""

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
    if not n or not v:  # a grid must not be empty
        return
    # A kernel needs every pointer: absent tensors are replaced by `unread`, and the constexpr flags skip their code.
    unread = normaliser.row_max
    k = 0 if at_ids is None else at_ids.column.shape[-1]
    column, g_same, g_total = (unread,) * 3 if at_ids is None else (at_ids.column, at_ids.g_same, at_ids.g_total)
    entropy_rows = (unread, unread) if entropy is None else entropy
    row_inputs = [x.contiguous() for x in (*normaliser, *entropy_rows, column, g_same)]
    settings = dict(HAS_TEMPERATURE=temperature != 1.0, IS_NORMALISED=normalised, WITH_ENTROPY=entropy is not None)
    width = min(step, triton.next_power_of_2(v))
    with torch.cuda.device_of(block):
        # 1. The logits at the ids for the second kernel, before the first one overwrites them: `out` may be `block`.
        z_t = block.gather(-1, column.clamp_min(0).long()) if k > 1 else None
        # 2. to 5. Every column, and the id if there is one per row.
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
        # 3. and 5. again, for several ids per row.
        if at_ids is not None and at_ids.g_other is not None and z_t is not None:
            width = min(IDS, triton.next_power_of_2(k))
            g_other = at_ids.g_other.contiguous()
            _gradient_at_ids[(n, triton.cdiv(k, width))](
                out, z_t, *row_inputs, g_other, k, *out.stride(), temperature, IDS=width, **settings
            )
    # Autograd does not notice in-place writes of a Triton kernel.
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
    # 2. The gradient of the log-probability at every column, as if no id were there: -p times the sum of cotangents.
    gradient = tl.zeros((STEP,), temperature.dtype)
    if IDS > 0:
        if IS_NORMALISED:
            gradient = tl.exp(log_p) * -tl.load(g_total_ptr + row)
        # 3. At a single id g (1 - p); the second kernel writes several ids.
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
        # 4. Zero for a row with only out-of-vocabulary ids. Selected, since 0 * NaN is NaN.
        gradient = tl.where(out_of_vocabulary, 0.0, gradient)
    # 5. Add the entropy, divide by the temperature, round once to the output's dtype.
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
    # 3. The cotangents of equal ids times 1 - p, and the cotangents of the row's other ids times -p.
    if IS_NORMALISED:
        from_other_ids = tl.exp(log_p) * tl.load(g_other_ptr + offset, mask=index < k, other=0.0)
        gradient = _one_minus_exp(log_p) * gradient - from_other_ids
    # 5. Entropy, temperature, one rounding. Equal ids write equal numbers, so their order does not matter.
    if WITH_ENTROPY:
        gradient += _entropy_gradient(shifted, log_p, row, shifted_mean_ptr, g_entropy_ptr)
    if HAS_TEMPERATURE:
        gradient = gradient / temperature
    gradient_ptr = out_ptr + row * out_row_stride + column * out_column_stride
    tl.store(gradient_ptr, gradient.to(out_ptr.dtype.element_ty), mask=column >= 0)


@triton.jit
def _shifted_logits(z, row, temperature, row_max_ptr, HAS_TEMPERATURE: tl.constexpr):
    """Shifted logits (z - m) / temperature of some logits of a row."""
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
    """-expm1(x) for x <= 0, to the last digit of float64: a power series near 0, where 1 - exp(x) would cancel."""
    series = tl.zeros_like(x) + 1.0
    for i in tl.static_range(15):
        series = 1.0 + series * x / (16 - i)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))
