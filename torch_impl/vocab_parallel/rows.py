"""Row blocks: logits of any strides, read a few rows at a time without a copy of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxtyping import Float
from torch import Tensor

from torch_impl.collectives import accumulator

# A block in the accumulation dtype: it should stay in a core's cache on a CPU, and fill a GPU.
BLOCK_BYTES = {"cpu": 1 << 20}
BLOCK_BYTES_ELSEWHERE = 1 << 26


def block_rows(logits: Float[Tensor, "*a v"], chunk_size: int | None) -> int:
    """Rows of one block: `chunk_size` positions of the last dim but one, or what suits the device."""
    if chunk_size is not None:
        return max(1, chunk_size * math.prod(logits.shape[:-2]))
    row_bytes = logits.shape[-1] * accumulator(logits.dtype).itemsize
    return max(1, BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES_ELSEWHERE) // max(1, row_bytes))


def row_blocks(x: Float[Tensor, "*a v"], rows: int) -> Iterator[tuple[slice, Float[Tensor, "n v"]]]:
    """Views of at most `rows` rows that cover x in order, each with the slice of rows that it is."""
    for part, (view,) in rows_together((x,), rows):
        yield part, view


def rows_together(xs: Sequence[Tensor], rows: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """`row_blocks` of tensors of one shape but any strides: the same rows of each."""
    done = 0
    for views in _row_views(xs, rows):
        view = views[0]
        yield slice(done, done + len(view)), views
        done += len(view)


def _row_views(xs: Sequence[Tensor], rows: int) -> Iterator[tuple[Tensor, ...]]:
    if xs[0].ndim == 1:
        yield tuple(x.unsqueeze(0) for x in xs)
        return
    try:
        flat = [x.view(math.prod(x.shape[:-1]), x.shape[-1]) for x in xs]
    except RuntimeError:  # no flat view has these strides, as for z[:, :-1]: one leading index at a time
        for parts in zip(*(x.unbind(0) for x in xs), strict=True):
            yield from _row_views(parts, rows)
    else:
        yield from zip(*(x.split(rows) for x in flat), strict=True)
