"""Shards of unequal lengths: some ranks have fewer tokens than a chunk or a convolution, and some none."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch_impl.layouts import TokenLayout

TOKENS = 5
COUNTS = {1: (5,), 2: (0, 5), 3: (2, 0, 3), 4: (0, 1, 0, 4)}  # tokens of each rank


def uneven(size: int, world: int) -> list[list[int]]:
    """The positions of each rank, as a layout of a scheme."""
    ends = list(accumulate(COUNTS[world]))
    return [list(range(end - count, end)) for end, count in zip(ends, COUNTS[world], strict=True)]


def uneven_layout(mesh: Any) -> TokenLayout:
    cp = mesh.size("cp")
    return TokenLayout.dense("ragged", TOKENS, cp_size=cp, cp_rank=mesh.rank("cp"), counts=COUNTS[cp])
