"""Shared prefixes of packed sequences: a sequence may continue another sequence, which may continue a third.

`prefix_of[j]` is the sequence that sequence j continues, or -1. For example, several responses may continue one prompt,
which is in the stream once. The list is on the host and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor


def validate_prefixes(prefix_of: Any, sequences: int) -> tuple[int, ...]:
    """`prefix_of` as a tuple with one entry per sequence.

    Errors: TypeError for entries that are not integers; ValueError unless there are as many entries as `sequences` and
            each is -1 or an earlier sequence.
    """
    try:
        parents = tuple(
            index(parent) for parent in (prefix_of.tolist() if isinstance(prefix_of, Tensor) else prefix_of)
        )
    except TypeError:
        raise TypeError(f"prefix_of={prefix_of!r}; pass the number of a sequence for each, or -1 for none") from None
    if len(parents) != sequences:
        raise ValueError(f"prefix_of: {len(parents)} entries for {sequences} sequences; give one for each, -1 for none")
    for j, parent in enumerate(parents):
        if not -1 <= parent < j:
            raise ValueError(f"prefix_of: sequence {j} continues {parent}; pass an earlier sequence, or -1 for none")
    return parents


def prefix_levels(prefix_of: Sequence[int]) -> list[list[int]]:
    """`levels[h][j]`: the sequence h + 1 steps before sequence j, or -1.

    >>> prefix_levels([-1, 0, 1, 0])
    [[-1, 0, 1, 0], [-1, -1, 0, -1]]
    """
    levels, level = [], list(prefix_of)
    while any(parent >= 0 for parent in level):
        levels.append(level)
        level = [prefix_of[parent] if parent >= 0 else -1 for parent in level]
    return levels


def pairs_of(
    level: Sequence[int], device: torch.device | None = None
) -> tuple[Int64[Tensor, " m"], Int64[Tensor, " m"]]:
    """(sequences with a prefix in this level, their prefixes)."""
    entries = torch.tensor(level, device=device)
    continued = (entries >= 0).nonzero()[:, 0]
    return continued, entries[continued]


def lengths_before(prefix_of: Sequence[int], real: Int64[Tensor, " q"]) -> Int64[Tensor, " q"]:
    """The number of real tokens in all prefixes of each sequence."""
    before = torch.zeros_like(real)
    for level in prefix_levels(prefix_of):
        continued, prefix = pairs_of(level, real.device)
        before[continued] += real[prefix]
    return before
