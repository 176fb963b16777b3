"""Rows of queries that meet rows of keys: what one call of an attention kernel computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Bool
from torch import Tensor

Rows = slice | Tensor
Places = tuple[slice | Tensor, Tensor]
LEAST = 128  # queries below which a triangle is not cut again


@dataclass(frozen=True)
class Block:
    """Runs of queries, each with its run of keys.

    Rows are one slice, for all of the batch, or [m, rows]: m runs of a batch of one. `is_causal`: query i of a run sees
    its keys 0 to i. `mask` [m or 1, 1, queries or 1, keys] is True where a key is seen, `blind` where a query has none;
    one row serves all. `own_queries` [m, queries] and `own_keys` [m, keys] are False where a shorter run is filled up;
    None: none is.
    """

    queries: Rows
    keys: Rows
    is_causal: bool = False
    mask: Bool[Tensor, "#m 1 #i j"] | None = None
    blind: Bool[Tensor, "#m 1 #i"] | None = None
    own_queries: Bool[Tensor, "m i"] | None = None
    own_keys: Bool[Tensor, "m j"] | None = None

    @cached_property
    def query_places(self) -> Places | None:
        """Where the queries of runs come from: their places among all of the block, and their rows."""
        return _places(self.queries, self.own_queries)

    @cached_property
    def key_places(self) -> Places | None:
        return _places(self.keys, self.own_keys)

    @cached_property
    def finer(self) -> tuple[Block, ...]:
        """The same pairs with less that is computed and thrown away: a triangle as two of half its size and a square.

        A kernel that works on 512 keys at a time computes all of a triangle of 512.
        """
        shortest = min(_length(self.queries), _length(self.keys))
        if not self.is_causal or shortest < 2 * LEAST:
            return (self,)
        half = shortest // 2
        early, late = slice(0, half), slice(half, None)
        parts = self._part(early, early), self._part(late, early, is_causal=False), self._part(late, late)
        return tuple(finer for part in parts for finer in part.finer)

    def _part(self, queries: slice, keys: slice, is_causal: bool = True) -> Block:
        own_queries = None if self.own_queries is None else self.own_queries[:, queries]
        own_keys = None if self.own_keys is None else self.own_keys[:, keys]
        rows = _cut(self.queries, queries), _cut(self.keys, keys)
        return replace(
            self, queries=rows[0], keys=rows[1], is_causal=is_causal, own_queries=own_queries, own_keys=own_keys
        )


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.shape[1]


def _cut(rows: Rows, part: slice) -> Rows:
    if not isinstance(rows, slice):
        return rows[:, part]
    stop = rows.stop if part.stop is None else rows.start + part.stop
    return slice(rows.start + part.start, stop)


def _places(rows: Rows, own: Bool[Tensor, "m i"] | None) -> Places | None:
    """Found once for each block, since it takes a look at the values; None for a slice."""
    if isinstance(rows, slice):
        return None
    flat = rows.flatten()
    if own is None:
        return slice(None), flat
    kept = own.flatten().nonzero().squeeze(1)
    return kept, flat[kept]
