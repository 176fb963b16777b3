"""Prefixes that packed sequences share: a sequence continues another one, which may continue a third.

`prefix_of[j]` is the sequence that sequence j continues, or -1: several responses to one prompt, each of which has the
prompt before it, while the prompt is in the stream once. It is data of the host, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor


def validate_prefixes(prefix_of: Any, sequences: int) -> tuple[int, ...]:
    """`prefix_of` as a tuple, with an entry for each of `sequences`.

    Errors: TypeError for entries that are not integers; ValueError for another number of them, or a sequence that
            continues no earlier one.
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
    """`levels[h][j]`: the sequence that is h + 1 steps before sequence j, or -1.

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
    """The sequences that have an entry in a level, and those entries."""
    entries = torch.tensor(level, device=device)
    continued = (entries >= 0).nonzero()[:, 0]
    return continued, entries[continued]


def lengths_before(prefix_of: Sequence[int], real: Int64[Tensor, " q"]) -> Int64[Tensor, " q"]:
    """The number of real tokens in all that each sequence continues."""
    before = torch.zeros_like(real)
    for level in prefix_levels(prefix_of):
        continued, prefix = pairs_of(level, real.device)
        before[continued] += real[prefix]
    return before
