"""Triton kernel: what one rank knows of its softmax rows, in one read of the logits.

A program reads one row, some columns at a time, and keeps as it goes

    m = max_v z_v      R = sum_v exp(b_v) - 1      D = sum_v exp(b_v) b_v      b_v = (z_v - m) / temperature

brought to the new maximum with each step: R is all terms but one largest, which is 1. The eager twin is
`vocab_parallel.statistics.local_statistics`, which also says what the results mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator

STEP = 4096  # columns that a program reads at a time
WARPS = 8
IDS = 64  # ids that it looks up at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a finite floor for depths, so that 0 log 0 is 0


def local_statistics(
    block: Float[Tensor, "n v"],
    column: Int[Tensor, "n k"] | None,
    temperature: float,
    with_entropy: bool,
    step: int = STEP,
) -> Float[Tensor, "f n"]:
    """Rows m and R, then k rows z_t if there are columns (+inf where one is below 0), then D / (1 + R) if asked."""
    n, v = block.shape
    k = 0 if column is None else column.shape[-1]
    out = torch.empty(2 + k + with_entropy, n, dtype=accumulator(block.dtype), device=block.device)
    if not n:  # a grid of no programs
        return out
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
            IS_HEATED=temperature != 1.0,
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
    IS_HEATED: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    STEP: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of_row = logits + row * row_stride
    heat = tl.load(temperature)
    largest = tl.full((), float("-inf"), heat.dtype)
    rest = tl.zeros((), heat.dtype)
    depth = tl.zeros((), heat.dtype)
    for start in range(0, v, STEP):
        columns = start + tl.arange(0, STEP)
        z = tl.load(of_row + columns.to(tl.int64) * column_stride, mask=columns < v, other=float("-inf"))
        z = z.to(heat.dtype)
        top = tl.maximum(largest, tl.max(z, 0))
        shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)  # a row of -inf: -inf - -inf would be NaN
        depths = z - shift
        above = largest - shift
        if IS_HEATED:
            depths = depths / heat
            above = above / heat
        terms = tl.exp(depths)
        weight = tl.exp(above)
        tops = tl.sum(tl.where(z == top, terms, 0.0), 0)
        others = tl.sum(tl.where(z == top, 0.0, terms), 0)
        if WITH_ENTROPY:
            lowered = tl.where(weight > 0.0, above, 0.0)  # 0 * -inf is no zero
            depth = weight * (depth + (1.0 + rest) * lowered) + tl.sum(terms * tl.maximum(depths, LOWEST), 0)
        # The 1 that was left out counts for its weight once another term is the largest.
        rest = weight * rest + others + tl.where(top > largest, (tops - 1.0) + weight, tops)
        largest = top
    # A maximum passes over NaN; the sum does not.
    largest = tl.where((rest != rest) & (largest < float("inf")), float("nan"), largest)
    tl.store(out + row, largest)
    tl.store(out + n + row, rest)
    if IDS > 0:
        for first in range(0, k, IDS):
            slot = first + tl.arange(0, IDS)
            column = tl.load(ids + row * k + slot, mask=slot < k, other=-1).to(tl.int64)
            z_t = tl.load(of_row + column * column_stride, mask=column >= 0, other=float("inf"))
            tl.store(out + (2 + slot.to(tl.int64)) * n + row, z_t.to(heat.dtype), mask=slot < k)
    if WITH_ENTROPY:
        tl.store(out + entropy_at + row, depth / (1.0 + rest))
