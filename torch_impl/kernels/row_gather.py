"""Triton kernel: rows in the order of an index array, one read and one write.

The tensor is seen as [outer, rows, inner], and a program copies a tile of some rows by some inner columns. Bits are
copied, whatever they mean. The eager twin is `torch.index_select`, in `rows.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int, Shaped
from torch import Tensor

TILE = 4096  # elements that a program copies
WARPS = 4
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gathered_rows(
    x: Shaped[Tensor, "*a"], index: Int[Tensor, " m"], dim: int, tile: int = TILE
) -> Shaped[Tensor, "*b"]:
    """x.index_select(dim, index)."""
    taken = len(index)
    out = x.new_empty((*x.shape[:dim], taken, *x.shape[dim + 1 :]))
    if not out.numel():
        return out
    source = x.reshape(x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel())
    outer, rows, inner = source.shape
    if not index.is_cuda and not bool(((index >= 0) & (index < rows)).all()):  # on CUDA the kernel asserts it
        raise IndexError(f"kernels.rows_at: index has entries outside [0, {rows}), the rows along dim {dim}")
    columns = min(triton.next_power_of_2(inner), tile)
    height = min(triton.next_power_of_2(taken), max(tile // columns, 1))
    grid = (outer * triton.cdiv(taken, height), triton.cdiv(inner, columns))
    with torch.cuda.device_of(x):
        gather_kernel[grid](
            _as_bits(out),
            _as_bits(source),
            index.contiguous(),
            rows,
            taken,
            inner,
            *source.stride(),
            HEIGHT=height,
            COLUMNS=columns,
            num_warps=WARPS,
            debug=True,  # for the assertion
            sanitize_overflow=False,
        )
    return out


def _as_bits(x: Tensor) -> Tensor:
    """Integers of the same size; a complex number of 16 bytes is refused by name, as none has its size."""
    if x.element_size() not in BITS:
        raise TypeError(f"kernels.rows_at: x is {str(x.dtype).removeprefix('torch.')}; pass torch.view_as_real(x)")
    return x.view(BITS[x.element_size()])


@triton.jit
def gather_kernel(
    out,
    source,
    index,
    rows,
    taken,
    inner,
    outer_stride,
    row_stride,
    column_stride,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tiles = tl.cdiv(taken, HEIGHT)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    place = tl.program_id(0) % tiles * HEIGHT + tl.arange(0, HEIGHT)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    row = tl.load(index + place, mask=place < taken, other=0).to(tl.int64)
    tl.device_assert((row >= 0) & (row < rows), "kernels.rows_at: an index is outside its dim")
    inside = (place < taken)[:, None] & (column < inner)[None, :]
    taken_from = source + outer * outer_stride + row[:, None] * row_stride + column[None, :] * column_stride
    written_to = out + (outer * taken + place.to(tl.int64))[:, None] * inner + column[None, :]
    tl.store(written_to, tl.load(taken_from, mask=inside), mask=inside)
