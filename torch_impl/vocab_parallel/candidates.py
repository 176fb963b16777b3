"""Columns whose logit lies between two bounds, as short lists in id order.

Each rank looks at its own columns only. A filter closes in on one logit in several rounds, and each round asks
for columns within narrower bounds than the last: once a row block's list is short it is kept and the block is
not read again, so that rows with a few likely tokens are read once or twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_impl.vocab_parallel.rows import block_rows, row_blocks

# A list of m entries takes about 24 m bytes; so many entries keep all lists within a tenth of the logits.
SHORT, SHARE = 64, 512
# A list of all columns of a block takes several times the block's memory.
FINER = 8


class Found(NamedTuple):
    """Entries of one row block, ordered by row (of the block), then by column."""

    rows: Int[Tensor, " m"]
    columns: Int[Tensor, " m"]
    logits: Float[Tensor, " m"]


class Candidates:
    """Columns of each row between two bounds that only ever close in."""

    def __init__(self, logits: Float[Tensor, "*a v"], chunk_size: int | None) -> None:
        rows = max(1, block_rows(logits, chunk_size) // FINER)
        self.dtype, self.device = logits.dtype, logits.device
        self._blocks = list(row_blocks(logits, rows))
        self._lists: list[Found | None] = [None] * len(self._blocks)

    def between(self, low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Iterator[tuple[slice, int, Found]]:
        """For each row block its slice of rows, their number, and at least its columns with low <= z <= high.

        A list kept from an earlier round has columns outside the bounds too: whoever reads it selects.
        """
        for i, (part, block) in enumerate(self._blocks):
            found = self._lists[i]
            if found is None:
                found = _found(block, low[part], high[part])
                if len(found.rows) <= SHORT + block.numel() // SHARE:
                    self._lists[i] = found
            yield part, len(block), found


def ordinals(flags: Bool[Tensor, " m"], rows: Int[Tensor, " m"], n: int) -> Int[Tensor, " m"]:
    """Of each flagged entry: how many flagged ones of its row come before it."""
    per_row = counted(flags, rows, n)
    before_row = per_row.cumsum(0) - per_row
    return flags.cumsum(0) - 1 - before_row[rows]


def counted(flags: Bool[Tensor, " m"], rows: Int[Tensor, " m"], n: int) -> Int[Tensor, " n"]:
    """How many entries of each row are flagged."""
    return torch.zeros(n, dtype=torch.int64, device=flags.device).index_add_(0, rows, flags.long())


def _found(block: Float[Tensor, "n v"], low: Float[Tensor, " n"], high: Float[Tensor, " n"]) -> Found:
    inside = (block >= low.unsqueeze(-1)) & (block <= high.unsqueeze(-1))
    rows, columns = inside.nonzero(as_tuple=True)
    return Found(rows, columns, block[rows, columns])
