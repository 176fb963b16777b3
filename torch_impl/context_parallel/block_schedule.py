"""Which rows of queries meet which rows of keys, for each rank whose keys this rank sees: index arrays, no attention.

Every layout keeps the tokens of a sequence in order on each rank, so a rank's share of a sequence is one run of rows,
its real tokens first. Of the queries of one rank and the keys of another all pairs count, or those below a diagonal,
or none: no mask, except at the edges of a window, for which queries are cut into short runs.

Rows of queries that meet rows of keys: what one call of an attention kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_impl.layouts.token_layout import TokenLayout

MOST_LENGTHS = 8  # distinct lengths of sequences; where there are more, those up to one power of two share a block
TILE = 256  # queries that meet the keys of their window together


@dataclass(frozen=True)
class BlockSchedule:
    """`blocks[source]`: what this rank's queries see of the keys of rank `source`. `hops`: how far keys travel."""

    rank: int
    counts: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]
    hops: int


def schedule_of(layout: TokenLayout, causal: bool, window: int | None) -> BlockSchedule:
    """The pairs of one rank. All layers that share a layout share them: a memo, which changes no result.

    Cost:   one copy of two numbers per rank and sequence to the host. With a window that does not see all anyway, the
            positions too; work grows with tokens times window + TILE, and masks are of the runs at a window's edges,
            at most 2 * TILE keys each, one for all that are alike. Kept as long as the layout is.
    """
    return layout.derived(("schedule", causal, window), lambda: _schedule(layout, causal, window))


def _schedule(layout: TokenLayout, causal: bool, window: int | None) -> BlockSchedule:
    runs = _Runs.of(layout)
    sources = range(layout.cp_size)
    overlap = [_overlap(layout.kind, runs, layout.cp_rank, source, causal) for source in sources]
    near = window if window is not None and window < max(runs.real.sum(0).tolist(), default=0) else None
    blocks = [_blocks(_Rules(layout, source, causal, near), *overlap[source]) for source in sources]
    return BlockSchedule(layout.cp_rank, layout.counts, tuple(blocks), _hops(layout, causal, window))


def _hops(layout: TokenLayout, causal: bool, window: int | None) -> int:
    """With contiguous rows a causal window reaches back over a few ranks only."""
    everyone = layout.cp_size - 1
    if layout.kind != "contiguous" or not causal or window is None:
        return everyone
    return min(everyone, -(-(window - 1) // max(layout.counts[0], 1)))


@dataclass(frozen=True)
class _Runs:
    """Of every rank and sequence, on the host: first row, real rows, rows of DualChunkSwap's early chunk, place."""

    start: Int64[Tensor, "n q"]
    real: Int64[Tensor, "n q"]
    early: Int64[Tensor, "n q"]
    place: Int64[Tensor, "n q"]

    @staticmethod
    def of(layout: TokenLayout) -> _Runs:
        cu, rows = layout.cu_padded.long(), _rising(layout)
        n, ends = len(rows), cu[:-1] + layout.cu_real.long().diff()

        def row_of(position: Tensor) -> Tensor:
            return torch.searchsorted(rows, position.expand(n, -1).contiguous())

        start, stop = row_of(cu[:-1]), row_of(cu[1:])
        beyond = torch.cat([rows, rows.new_full((n, 1), layout.total)], 1)
        fields = start, row_of(ends) - start, (stop - start) // 2, beyond.gather(1, start) - cu[:-1]
        return _Runs(*torch.stack(fields).cpu())


@dataclass(frozen=True)
class _Overlap:
    """Of every sequence: the first query and key that meet, and how many."""

    query: Int64[Tensor, " q"]
    queries: Int64[Tensor, " q"]
    key: Int64[Tensor, " q"]
    keys: Int64[Tensor, " q"]

    def of(self, which: Bool[Tensor, " q"]) -> _Overlap:
        return _Overlap(self.query[which], self.queries[which], self.key[which], self.keys[which])


def _overlap(kind: str, runs: _Runs, rank: int, source: int, causal: bool) -> tuple[_Overlap, bool]:
    """What of `source` the queries of `rank` see, and whether only below the diagonal."""
    query, queries, key, keys = runs.start[rank], runs.real[rank], runs.start[source], runs.real[source]
    if not causal or rank == source:
        return _Overlap(query, queries, key, keys), causal
    if kind == "striped":
        # Where the source's stripe is the later one, a query sees as many keys as queries stand before it. The source
        # has that many: its stripe is at most one token shorter, and only if it is the later one.
        late = (runs.place[source] > runs.place[rank]).long()
        queries = (queries - late).clamp(min=0)
        return _Overlap(query + late, queries, key, queries), True
    if kind in ("contiguous", "ragged"):
        return _Overlap(query, queries, key, keys * (source < rank)), False
    early = runs.early[rank]
    if source < rank:  # its early chunk stands before both of ours, its late one behind both
        return _Overlap(query, queries, key, torch.minimum(keys, early)), False
    return _Overlap(query + early, (queries - early).clamp(min=0), key, keys), False


def _rising(layout: TokenLayout) -> Int64[Tensor, "n local"]:
    """The positions of every rank; what fills a ragged row stands behind it."""
    return torch.where(layout.index < 0, layout.total, layout.index)


@dataclass(frozen=True)
class _Rules:
    """Whose keys are rules about, and by which rules they are seen."""

    layout: TokenLayout
    source: int
    causal: bool
    window: int | None


def _blocks(rules: _Rules, overlap: _Overlap, is_causal: bool) -> tuple[Block, ...]:
    """All blocks of one source: of the edges of windows, and of what stands between them, which all queries see."""
    if rules.window is None:
        return _of_lengths(rules, overlap, is_causal)
    early, between, late = _cut_by_window(rules, overlap, rules.window)  # apart, since a block has a query once
    edges = _of_lengths(rules, early, False) + _of_lengths(rules, late, False)
    return edges + _of_lengths(replace(rules, window=None), between, False)


def _cut_by_window(rules: _Rules, overlap: _Overlap, window: int) -> tuple[_Overlap, _Overlap, _Overlap]:
    """Runs of TILE queries: with keys that the late ones of a run do not see, that all see, that early ones do not."""
    rows = _rising(rules.layout).cpu()
    of_queries, of_keys = rows[rules.layout.cp_rank], rows[rules.source]
    tiles = -(-overlap.queries // TILE)
    each = torch.repeat_interleave(tiles)
    begin = (torch.arange(len(each)) - (tiles.cumsum(0) - tiles)[each]) * TILE
    query, queries = overlap.query[each] + begin, (overlap.queries[each] - begin).clamp(max=TILE)
    first, last = of_queries[query], of_queries[query + queries - 1]
    key, end = overlap.key[each], (overlap.key + overlap.keys)[each]

    def key_at(position: Tensor) -> Tensor:
        return torch.searchsorted(of_keys, position).clamp(key, end)

    behind, ahead = window - 1, 0 if rules.causal else window - 1
    start, stop = key_at(first - behind), key_at(last + ahead + 1)
    common, rest = key_at(last - behind), key_at(first + ahead + 1)
    common, rest = (torch.where(rest > common, x, stop) for x in (common, rest))
    cuts = (start, common), (common, rest), (rest, stop)
    early, between, late = (_Overlap(query, queries, begin, end - begin) for begin, end in cuts)
    return early, between, late


def _of_lengths(rules: _Rules, overlap: _Overlap, is_causal: bool) -> tuple[Block, ...]:
    """One block for each pair of lengths that occurs, however many runs have it; of one sequence one for each run."""
    overlap = overlap.of((overlap.queries > 0) & (overlap.keys > 0))
    lengths = torch.stack([overlap.queries, overlap.keys], 1)
    alike = torch.arange(len(lengths)) if len(rules.layout.cu_padded) == 2 else _alike(lengths)
    masks: dict[Any, tuple[Tensor, Tensor | None]] = {}
    blocks = []
    for group in range(max(alike.tolist(), default=-1) + 1):
        chosen = alike == group
        blocks.append(_block(rules, overlap.of(chosen), lengths[chosen].amax(0).tolist(), is_causal, masks))
    return tuple(block for block in blocks if block is not None)


def _alike(lengths: Int64[Tensor, "m 2"]) -> Int64[Tensor, " m"]:
    """The number of the block that each run of queries and keys is in."""
    distinct, alike = lengths.unique(dim=0, return_inverse=True)
    if len(distinct) > MOST_LENGTHS:
        powers = (lengths - 0.5).log2().floor()  # one for those up to each power of two
        alike = powers.unique(dim=0, return_inverse=True)[1]
    return alike


def _block(
    rules: _Rules, overlap: _Overlap, shape: list[int], is_causal: bool, masks: dict[Any, tuple[Tensor, Tensor | None]]
) -> Block | None:
    """The runs of one shape; None if the window hides all keys."""
    device = rules.layout.index.device
    queries, is_query = _filled(overlap.query, overlap.queries, shape[0])
    keys, is_key = _filled(overlap.key, overlap.keys, shape[1])
    fill_is_seen = not is_causal or bool((overlap.keys < overlap.queries).any())
    mask = blind = None
    if rules.window is not None or (fill_is_seen and not is_key.all()):
        seen = _seen(rules, queries, keys, is_key, is_causal)
        if not seen.any():
            return None
        mask, blind = _shared_mask(seen, masks, device)
    return Block(
        _rows(queries, is_query, device),
        _rows(keys, is_key, device),
        is_causal and mask is None,
        mask,
        blind,
        None if is_query.all() else is_query.to(device),
        None if is_key.all() else is_key.to(device),
    )


def _seen(rules: _Rules, queries: Tensor, keys: Tensor, is_key: Tensor, is_causal: bool) -> Bool[Tensor, "m i j"]:
    """Which of its keys each query of a run sees; i is 1 where all see the same."""
    mask = is_key[:, None]
    if rules.window is None and not is_causal:
        return mask
    index = rules.layout.index.cpu().int()
    ahead = index[rules.layout.cp_rank][queries][:, :, None] - index[rules.source][keys][:, None, :]
    mask = mask & (ahead >= 0) if rules.causal else mask
    return mask & (ahead.abs() < rules.window) if rules.window is not None else mask


def _shared_mask(
    seen: Bool[Tensor, "m i j"], masks: dict[Any, tuple[Tensor, Tensor | None]], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """A mask and the queries it leaves blind: one for all runs of a block, and for all blocks, that have the same."""
    if (seen == seen[:1]).all():
        seen = seen[:1]
    key = seen.shape, seen.numpy().tobytes()
    if key not in masks:
        blind = ~seen.any(-1)
        masks[key] = seen[:, None].to(device), blind[:, None].to(device) if blind.any() else None
    return masks[key]


def _filled(start: Tensor, length: Tensor, longest: int) -> tuple[Int64[Tensor, "m i"], Bool[Tensor, "m i"]]:
    """The rows of every run, the last one repeated up to the longest, and which of them are no such repetition."""
    i = torch.arange(longest)
    return start[:, None] + torch.minimum(i, length[:, None] - 1), i < length[:, None]


def _rows(rows: Int64[Tensor, "m i"], own: Bool[Tensor, "m i"], device: torch.device) -> Rows:
    """One run as a slice, which copies nothing."""
    if len(rows) > 1 or not own.all():
        return rows.to(device)
    return slice(int(rows[0, 0]), int(rows[0, -1]) + 1)


Rows = slice | Tensor
Places = tuple[slice | Tensor, Tensor]
LEAST = 128  # queries below which a triangle is not cut again


@dataclass(frozen=True)
class Block:
    """Runs of queries, each with its run of keys.

    Rows are one slice, for all of the batch, or [m, rows]: m runs of a batch of one. `is_causal`: query i of a run sees
    its keys 0 to i. `mask` [m or 1, 1, queries or 1, keys] is True where a key is seen, `blind` where a query has none;
    one row serves all. `is_query` [m, queries] and `is_key` [m, keys] are False where a shorter run is filled up;
    None: none is.
    """

    queries: Rows
    keys: Rows
    is_causal: bool = False
    mask: Bool[Tensor, "#m 1 #i j"] | None = None
    blind: Bool[Tensor, "#m 1 #i"] | None = None
    is_query: Bool[Tensor, "m i"] | None = None
    is_key: Bool[Tensor, "m j"] | None = None

    @cached_property
    def query_places(self) -> Places | None:
        """Where the queries of runs come from: their places among all of the block, and their rows."""
        return _places(self.queries, self.is_query)

    @cached_property
    def key_places(self) -> Places | None:
        return _places(self.keys, self.is_key)

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
        is_query = None if self.is_query is None else self.is_query[:, queries]
        is_key = None if self.is_key is None else self.is_key[:, keys]
        rows = _part_of(self.queries, queries), _part_of(self.keys, keys)
        return replace(self, queries=rows[0], keys=rows[1], is_causal=is_causal, is_query=is_query, is_key=is_key)


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.shape[1]


def _part_of(rows: Rows, part: slice) -> Rows:
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
    present = own.flatten().nonzero().squeeze(1)
    return present, flat[present]
