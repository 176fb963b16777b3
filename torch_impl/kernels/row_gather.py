"""Triton kernel that gathers rows by an index array, with one read and one write of each.

The tensor is seen as [outer, rows, inner], and a program copies a tile of some rows by some inner columns. Bits are
copied, whatever the dtype. The eager equivalent is `torch.index_select`, in `rows.py`. Pointers of the kernel:

    out_ptr      [outer, count, inner]  contiguous
    source_ptr   [outer, rows, inner]   in any strides (outer_stride, row_stride, column_stride)
    index_ptr    [count]                int64, the row of the source for each row of the result
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int, Shaped
from torch import Tensor

TILE_ELEMENTS = 4096  # elements that a program copies
WARPS = 4
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(
    x: Shaped[Tensor, "*a"], index: Int[Tensor, " m"], dim: int, tile: int = TILE_ELEMENTS
) -> Shaped[Tensor, "*b"]:
    """x.index_select(dim, index)."""
    count = len(index)
    out = x.new_empty((*x.shape[:dim], count, *x.shape[dim + 1 :]))
    if not out.numel():
        return out
    # Strides are passed to the kernel, so this copies x only where the flattened dims have no common stride.
    source = x.reshape(x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel())
    outer, rows, inner = source.shape
    # On CUDA the kernel asserts this itself: reading the index from the host would wait for the device.
    if not index.is_cuda and not bool(((index >= 0) & (index < rows)).all()):
        raise IndexError(f"kernels.rows_at: index has entries outside [0, {rows}), the rows along dim {dim}")
    # Wide rows are copied one or few at a time, narrow rows many at a time.
    columns = min(triton.next_power_of_2(inner), tile)
    height = min(triton.next_power_of_2(count), max(tile // columns, 1))
    grid = (outer * triton.cdiv(count, height), triton.cdiv(inner, columns))
    with torch.cuda.device_of(x):
        gather_kernel[grid](
            _as_bits(out),
            _as_bits(source),
            index.contiguous(),
            rows,
            count,
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
    """x viewed as integers of the same size. Errors: TypeError for complex128, for which there are none."""
    if x.element_size() not in BITS:
        raise TypeError(f"kernels.rows_at: x is {str(x.dtype).removeprefix('torch.')}; pass torch.view_as_real(x)")
    return x.view(BITS[x.element_size()])


@triton.jit
def gather_kernel(
    out_ptr,
    source_ptr,
    index_ptr,
    rows,
    count,
    inner,
    outer_stride,
    row_stride,
    column_stride,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # int64 throughout: an offset into a large tensor does not fit 32 bits.
    tiles = tl.cdiv(count, HEIGHT)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    out_row = tl.program_id(0) % tiles * HEIGHT + tl.arange(0, HEIGHT)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    # Lanes beyond the index get row 0, so that the assertion passes; they store nothing.
    row = tl.load(index_ptr + out_row, mask=out_row < count, other=0).to(tl.int64)
    tl.device_assert((row >= 0) & (row < rows), "kernels.rows_at: an index is outside its dim")
    in_tensor = (out_row < count)[:, None] & (column < inner)[None, :]
    read_ptr = source_ptr + outer * outer_stride + row[:, None] * row_stride + column[None, :] * column_stride
    write_ptr = out_ptr + (outer * count + out_row.to(tl.int64))[:, None] * inner + column[None, :]
    tl.store(write_ptr, tl.load(read_ptr, mask=in_tensor), mask=in_tensor)
