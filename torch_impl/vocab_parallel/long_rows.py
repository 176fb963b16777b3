"""Statistics and gradient of long rows on a CPU, tile by tile.

An operation takes about 3 us before it touches an element, and a pass over many MiB waits for memory. So per-column
values are computed in tiles of a few rows, in buffers that stay in the cache, and per-row values in one call for all
rows of a block.

The sum of a row leaves out the term of one largest logit (`statistics` explains why), and an argmax takes ten times as
long as the maximum alone. So a row is summed in spans of SPAN columns, and only the span with the maximum is summed
again without that term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from torch_impl.collectives import accumulator

MIN_COLUMNS = 4096  # a row is long from this width on
SPAN = 256  # columns
TILE_BYTES = 2 << 20  # size of a tile's buffers
MIN_BLOCK_ROWS = 64  # the per-block computation takes 8 KiB per row

LOG2_E = math.log2(math.e)
LOWEST_SHIFTED = -(2.0**14)  # 2 ** LOWEST_SHIFTED is 0 in float64, and products with LOWEST_SHIFTED are finite


def applies_to(block: Float[Tensor, "*n v"]) -> bool:
    """Whether to compute these rows here: eager mode, on a CPU, with MIN_COLUMNS columns or more."""
    return block.is_cpu and block.shape[-1] >= MIN_COLUMNS and not torch.compiler.is_compiling()


def rows_per_block(width: int, dtype: torch.dtype) -> int:
    """Rows of a block of long rows: one tile's rows, but at least MIN_BLOCK_ROWS.

    Short rows are computed a block at a time, so `statistics.rows_per_block` makes a block small enough for the cache.
    Long rows are computed a tile at a time, so a block may be larger: large enough that operations per block cost
    little compared with operations per tile.
    """
    return max(MIN_BLOCK_ROWS, _rows_per_tile(width, dtype, buffer_count=1))


def row_sums(
    block: Float[Tensor, "n v"], temperature: float, with_entropy: bool
) -> tuple[Float[Tensor, "n 1"], Float[Tensor, "n 1"], Float[Tensor, "n 1"] | None]:
    """m_r, R_r and, with entropy, the sum of exp(b_v) b_v log2(e) of each row, as in `statistics`."""
    dtype, (n, width) = accumulator(block.dtype), block.shape
    scale, span_count = LOG2_E / temperature, -(-width // SPAN)
    span_max, span_sum = block.new_empty(2, n, span_count, dtype=dtype)
    weighted_sum = block.new_empty(n, 1, dtype=dtype) if with_entropy else None
    # 1. Tile by tile: the maximum of each span, and the sum of its terms relative to the row's maximum.
    for rows, tile, buffers in _tiles(block, dtype, 1 + with_entropy):
        wide = tile if tile.dtype == dtype else buffers[0].copy_(tile)
        _reduce_spans(torch.amax, wide, span_max[rows])
        shift = finite_shift(span_max[rows].amax(-1, keepdim=True))
        shifted = torch.sub(wide, shift, out=buffers[0]).mul_(scale)
        terms = torch.exp2(shifted, out=buffers[-1])
        _reduce_spans(torch.sum, terms, span_sum[rows])
        if weighted_sum is not None:
            weighted_sum[rows] = terms.mul_(shifted.clamp_min_(LOWEST_SHIFTED)).sum(-1, keepdim=True)
    # 2. Sum the span with the maximum again, for all rows at once. Columns beyond the last one count as -inf.
    row_max, span = span_max.max(-1, keepdim=True)
    columns = torch.add(torch.arange(SPAN, device=block.device), span, alpha=SPAN)
    logits = block.gather(-1, columns.clamp_max(width - 1)).to(dtype).masked_fill_(columns >= width, -math.inf)
    largest = logits.argmax(-1, keepdim=True)
    terms = logits.sub_(finite_shift(row_max)).mul_(scale).exp2_().scatter_(-1, largest, 0.0)
    row_sum_m1 = span_sum.scatter_(-1, span, terms.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    return row_max, row_sum_m1, weighted_sum


def write_terms(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    row_max: Float[Tensor, "n 1"],
    temperature: float,
    row_intercept: Float[Tensor, "n 1"],
    row_slope: Float[Tensor, "n 1"] | None,
) -> None:
    """out = exp(b) (row_slope b_2 + row_intercept), b = (block - row_max) / temperature, b_2 = log2(e) b; rounded once.

    `out` may be the block. Without `row_slope` the result is exp(b) row_intercept.
    """
    dtype, scale = row_max.dtype, LOG2_E / temperature
    for rows, tile, buffers in _tiles(block, dtype, 1 if row_slope is None else 2):
        gradient = out[rows]
        shifted = gradient if gradient.dtype == dtype else buffers[0]
        wide = tile if tile.dtype == dtype else shifted.copy_(tile)
        torch.sub(wide, row_max[rows], out=shifted).mul_(scale)
        if row_slope is None:
            shifted.exp2_().mul_(row_intercept[rows])
        else:
            terms = torch.exp2(shifted, out=buffers[1])
            shifted.clamp_min_(LOWEST_SHIFTED).mul_(row_slope[rows]).add_(row_intercept[rows]).mul_(terms)
        if shifted is not gradient:
            gradient.copy_(shifted)


def write_fused_terms(
    out: Float[Tensor, "n v"],
    block: Float[Tensor, "n v"],
    row_max: Float[Tensor, "n 1"],
    temperature: float,
    row_intercept: Float[Tensor, "n 1"],
    row_slope: Float[Tensor, "n 1"] | None,
) -> None:
    """`write_terms` as one expression, for the compiler to fuse."""
    shifted = (block - row_max) * (LOG2_E / temperature)  # in the dtype of row_max, which is at least as wide
    factor = row_intercept if row_slope is None else shifted.clamp_min(LOWEST_SHIFTED) * row_slope + row_intercept
    out.copy_(shifted.exp2() * factor)


def finite_shift(row_max: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """The shift of a row: its maximum, or 0 if that is infinite or NaN, since -inf - -inf is NaN."""
    return row_max.nan_to_num(0.0, 0.0, 0.0)


def _tiles(
    block: Float[Tensor, "n v"], dtype: torch.dtype, buffer_count: int
) -> Iterator[tuple[slice, Float[Tensor, "m v"], list[Float[Tensor, "m v"]]]]:
    """(slice of the rows, tile, buffers of the tile's shape) for each tile of a block; the tiles share the buffers."""
    n, width = block.shape
    size = max(1, min(n, _rows_per_tile(width, dtype, buffer_count)))  # at least 1, since a step of 0 is an error
    buffers = block.new_empty(buffer_count, size, width, dtype=dtype)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        yield rows, block[rows], [buffer[: rows.stop - start] for buffer in buffers]


def _rows_per_tile(width: int, dtype: torch.dtype, buffer_count: int) -> int:
    return max(1, TILE_BYTES // (buffer_count * width * dtype.itemsize))


def _reduce_spans(reduce: Callable[..., Tensor], x: Float[Tensor, "m v"], out: Float[Tensor, "m s"]) -> None:
    """`reduce` of each span of SPAN columns; the last span may be shorter."""
    count = x.shape[-1] // SPAN
    end = count * SPAN
    reduce(x[:, :end].unflatten(-1, (count, SPAN)), -1, out=out[:, :count])
    if end < x.shape[-1]:
        reduce(x[:, end:], -1, out=out[:, -1])
