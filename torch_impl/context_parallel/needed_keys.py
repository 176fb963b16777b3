"""Which keys the queries of each rank see: what an exchange of keys has to send, and no more.

It follows from the layout with its prefixes, the causal rule and the window alone, so that every rank knows it of all
ranks before anything is sent.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_impl.layouts.prefixes import pairs_of, prefix_levels
from torch_impl.layouts.token_layout import TokenLayout


def needed_rows(layout: TokenLayout, causal: bool, window: int | None) -> Bool[Tensor, "n n rows"]:
    """Which rows of keys each rank needs of each other: `[r, s, i]` is whether a query of rank r sees row i of rank s.

    A rank needs none of its own. Padding is needed by no rank.

    Cost: for each rank a search of all positions, on the layout's device.
    """
    seen = torch.stack([_seen_by(layout, rank, causal, window) for rank in range(layout.cp_size)])
    # A ragged row of the index is filled with -1, which is no position.
    needed = seen[:, layout.index.clamp(min=0)] & (layout.index >= 0)
    ranks = torch.arange(layout.cp_size, device=needed.device)
    needed[ranks, ranks] = False
    return needed


def _seen_by(layout: TokenLayout, rank: int, causal: bool, window: int | None) -> Bool[Tensor, " total"]:
    """Whether a query of `rank` sees the key at each position."""
    # 1. Every position as a key, and where the real tokens of its sequence start and end.
    key = torch.arange(layout.total, device=layout.index.device)
    start = layout.cu_padded.long()[layout.sequence_ids]
    end = start + layout.cu_real.long().diff()[layout.sequence_ids]
    span = layout.total if window is None else window
    # 2. The first query of the rank from the key on. Padding follows the real tokens of its sequence, so if this is
    #    padding, no real query of the sequence follows.
    queries = layout.index[rank, : layout.counts[rank]]
    following = torch.searchsorted(queries, key)
    seen = _at(queries, following, beyond=layout.total) < torch.minimum(key + span, end)
    # 3. Without the causal rule also the last query before it.
    if not causal:
        seen |= _at(queries, following - 1, beyond=-1) >= torch.maximum(key - span + 1, start)
    # 4. And queries of the sequences that continue that of the key.
    if layout.prefix_of:
        seen |= _seen_by_continuations(layout, queries, span)
    return seen & (key < end)


def _seen_by_continuations(layout: TokenLayout, queries: Int64[Tensor, " rows"], span: int) -> Bool[Tensor, " total"]:
    """Whether a query of a sequence that continues that of the key is less than `span` positions from it."""
    # 1. The first real query that the rank has of each sequence, as its position in all that this continues.
    start, real = layout.cu_padded[:-1].long(), layout.cu_real.long().diff()
    place = _at(queries, torch.searchsorted(queries, start), beyond=layout.total) - start
    never = 2 * layout.total
    first = torch.where(place < real, place + layout.lengths_before, never)
    # 2. For each sequence the first of all that continue it: they come after all of its keys, the first is nearest.
    nearest = torch.full_like(first, never)
    for level in prefix_levels(layout.prefix_of):
        continued, prefix = pairs_of(level, first.device)
        nearest.scatter_reduce_(0, prefix, first[continued], "amin")
    # 3. No two real tokens are `total` positions apart.
    return nearest[layout.sequence_ids] - layout.position_ids < min(span, layout.total)


def _at(queries: Int64[Tensor, " rows"], index: Int64[Tensor, " total"], beyond: int) -> Int64[Tensor, " total"]:
    """The query at each index, or the position `beyond` where the rank has none."""
    is_query = (index >= 0) & (index < len(queries))
    if not len(queries):
        return torch.full_like(index, beyond)
    return torch.where(is_query, queries[index.clamp(0, len(queries) - 1)], beyond)
