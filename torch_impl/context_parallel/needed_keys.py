"""Find the keys that each rank's queries see. An exchange must send exactly these keys.

They depend only on the layout with its prefixes, the causal rule and the window. So every rank computes the keys of all
ranks before anything is sent.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_impl.layouts.prefixes import pairs_of, prefix_levels
from torch_impl.layouts.token_layout import TokenLayout


def needed_rows(layout: TokenLayout, causal: bool, window: int | None) -> Bool[Tensor, "n n rows"]:
    """The rows of keys that ranks need from each other: [r, s, i] is true if a query of rank r sees row i of rank s.

    A rank's own rows and rows of padding are always false.

    Cost: for each rank a search of all positions, on the layout's device.
    """
    seen = torch.stack([_seen_by(layout, rank, causal, window) for rank in range(layout.cp_size)])
    # A ragged row of the index is filled with -1, which is not a position.
    needed = seen[:, layout.index.clamp(min=0)] & (layout.index >= 0)
    ranks = torch.arange(layout.cp_size, device=needed.device)
    needed[ranks, ranks] = False
    return needed


def _seen_by(layout: TokenLayout, rank: int, causal: bool, window: int | None) -> Bool[Tensor, " total"]:
    """Whether a query of `rank` sees the key at each position."""
    # 1. Take every position as a key, and find where the real tokens of its sequence start and end.
    key = torch.arange(layout.total, device=layout.index.device)
    start = layout.cu_padded.long()[layout.sequence_ids]
    end = start + layout.cu_real.long().diff()[layout.sequence_ids]
    span = layout.total if window is None else window
    # 2. Find the rank's first query at or after the key. Padding follows a sequence's real tokens, so if that query is
    #    padding, no real query of the sequence follows.
    queries = layout.index[rank, : layout.counts[rank]]
    following = torch.searchsorted(queries, key)
    seen = _at(queries, following, beyond=layout.total) < torch.minimum(key + span, end)
    # 3. Without the causal rule, check the last query before the key too.
    if not causal:
        seen |= _at(queries, following - 1, beyond=-1) >= torch.maximum(key - span + 1, start)
    # 4. Add queries of the sequences that continue the key's sequence.
    if layout.prefix_of:
        seen |= _seen_by_continuations(layout, queries, span)
    return seen & (key < end)


def _seen_by_continuations(layout: TokenLayout, queries: Int64[Tensor, " rows"], span: int) -> Bool[Tensor, " total"]:
    """Whether a sequence that continues the key's has a query less than `span` positions after the key."""
    # 1. Find the rank's first real query of each sequence, and its position counted from the prefixes' start.
    start, real = layout.cu_padded[:-1].long(), layout.cu_real.long().diff()
    place = _at(queries, torch.searchsorted(queries, start), beyond=layout.total) - start
    never = 2 * layout.total
    first = torch.where(place < real, place + layout.lengths_before, never)
    # 2. Find the first query in each sequence's continuations. It follows all keys of the sequence and is nearest.
    nearest = torch.full_like(first, never)
    for level in prefix_levels(layout.prefix_of):
        continued, prefix = pairs_of(level, first.device)
        nearest.scatter_reduce_(0, prefix, first[continued], "amin")
    # 3. Real tokens are less than `total` positions apart, and `never` is at least `total` after each key.
    return nearest[layout.sequence_ids] - layout.position_ids < min(span, layout.total)


def _at(queries: Int64[Tensor, " rows"], index: Int64[Tensor, " total"], beyond: int) -> Int64[Tensor, " total"]:
    """The query at each index, or `beyond` if the index is out of range."""
    is_query = (index >= 0) & (index < len(queries))
    if not len(queries):
        return torch.full_like(index, beyond)
    return torch.where(is_query, queries[index.clamp(0, len(queries) - 1)], beyond)
