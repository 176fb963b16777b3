"""Which rows of queries meet which rows of keys, for each rank whose keys this rank sees: index arrays, no attention.

Every layout keeps the tokens of a sequence in order on each rank, so a rank's share of a sequence is one run of rows,
its real tokens first. Of the queries of one rank and the keys of another all pairs count, or those below a diagonal,
or none: no mask, except for a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_impl.layouts.token_layout import TokenLayout

Rows = slice | Tensor
MOST_LENGTHS = 8  # distinct lengths of sequences; where there are more, lengths are rounded up to powers of two


Places = tuple[slice | Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """Runs of queries, each with its run of keys.

    Rows are one slice, for all of the batch, or [m, rows]: m runs of a batch of one. `is_causal`: query i of a run sees
    its keys 0 to i. `mask` [m, 1, queries or 1, keys] is True where a key is seen; `blind` where a query sees none.
    `own` [m, queries] is False where a shorter run is filled up.
    """

    queries: Rows
    keys: Rows
    is_causal: bool = False
    mask: Bool[Tensor, "m 1 i j"] | None = None
    blind: Bool[Tensor, "m 1 i"] | None = None
    own_queries: Bool[Tensor, "m i"] | None = None
    own_keys: Bool[Tensor, "m j"] | None = None

    @cached_property
    def query_places(self) -> Places | None:
        """Where the queries of runs come from: their places among all of the block, and their rows."""
        return _places(self.queries, self.own_queries)

    @cached_property
    def key_places(self) -> Places | None:
        return _places(self.keys, self.own_keys)


@dataclass(frozen=True)
class Pairs:
    """`blocks[source]`: what this rank's queries see of the keys of rank `source`. `hops`: how far keys travel."""

    rank: int
    counts: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]
    hops: int


_KNOWN: WeakKeyDictionary[TokenLayout, dict[tuple[bool, int | None], Pairs]] = WeakKeyDictionary()


def pairs_of(layout: TokenLayout, causal: bool, window: int | None) -> Pairs:
    """The pairs of one rank. All layers that share a layout share them: a memo, which changes no result.

    Cost:   one copy of two numbers per rank and sequence to the host.
    """
    known = _KNOWN.setdefault(layout, {})
    if (causal, window) not in known:
        known[causal, window] = _pairs(layout, causal, window)
    return known[causal, window]


def _pairs(layout: TokenLayout, causal: bool, window: int | None) -> Pairs:
    runs = _Runs.of(layout)
    sources = range(layout.cp_size)
    met = [_met(layout.kind, runs, layout.cp_rank, source, causal) for source in sources]
    blocks = [_blocks(layout, *met[source], source, causal, window) for source in sources]
    return Pairs(layout.cp_rank, layout.counts, tuple(blocks), _hops(layout, causal, window))


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
        cu = layout.cu_padded.long()
        rows = torch.where(layout.index < 0, layout.total, layout.index)  # what fills a ragged row stands behind it
        n, ends = len(rows), cu[:-1] + layout.cu_real.long().diff()

        def row_of(position: Tensor) -> Tensor:
            return torch.searchsorted(rows, position.expand(n, -1).contiguous())

        start, stop = row_of(cu[:-1]), row_of(cu[1:])
        beyond = torch.cat([rows, rows.new_full((n, 1), layout.total)], 1)
        fields = start, row_of(ends) - start, (stop - start) // 2, beyond.gather(1, start) - cu[:-1]
        return _Runs(*torch.stack(fields).cpu())


@dataclass(frozen=True)
class _Met:
    """Of every sequence: the first query and key that meet, and how many."""

    query: Int64[Tensor, " q"]
    queries: Int64[Tensor, " q"]
    key: Int64[Tensor, " q"]
    keys: Int64[Tensor, " q"]


def _met(kind: str, runs: _Runs, rank: int, source: int, causal: bool) -> tuple[_Met, bool]:
    """What of `source` the queries of `rank` see, and whether only below the diagonal."""
    query, queries, key, keys = runs.start[rank], runs.real[rank], runs.start[source], runs.real[source]
    if not causal or rank == source:
        return _Met(query, queries, key, keys), causal
    if kind == "striped":
        # Where the source's stripe is the later one, a query sees as many keys as queries stand before it.
        late = (runs.place[source] > runs.place[rank]).long()
        queries = (queries - late).clamp(min=0)
        return _Met(query + late, queries, key, torch.minimum(keys, queries)), True
    if kind in ("contiguous", "ragged"):
        return _Met(query, queries, key, keys * (source < rank)), False
    early = runs.early[rank]
    if source < rank:  # its early chunk stands before both of ours, its late one behind both
        return _Met(query, queries, key, torch.minimum(keys, early)), False
    return _Met(query + early, (queries - early).clamp(min=0), key, keys), False


def _blocks(
    layout: TokenLayout, met: _Met, is_causal: bool, source: int, causal: bool, window: int | None
) -> tuple[Block, ...]:
    """One block for each pair of lengths that occurs, however many sequences have it."""
    some = (met.queries > 0) & (met.keys > 0)
    met = _Met(met.query[some], met.queries[some], met.key[some], met.keys[some])
    lengths = torch.stack([met.queries, met.keys], 1)
    distinct = lengths.unique(dim=0)
    if len(distinct) > MOST_LENGTHS:
        lengths = 2 ** ((lengths - 1).clamp(min=1).double().log2().floor().long() + (lengths > 1))
        distinct = lengths.unique(dim=0)
    found = []
    for shape in distinct:
        chosen = (lengths == shape).all(1)
        one = _Met(met.query[chosen], met.queries[chosen], met.key[chosen], met.keys[chosen])
        found.append(_block(layout, one, shape.tolist(), is_causal, source, causal, window))
    return tuple(block for block in found if block is not None)


def _block(
    layout: TokenLayout, met: _Met, shape: list[int], is_causal: bool, source: int, causal: bool, window: int | None
) -> Block | None:
    """The runs of one shape; None if the window hides all keys."""
    device = layout.index.device
    queries, own_queries = _filled(met.query, met.queries, shape[0])
    keys, own_keys = _filled(met.key, met.keys, shape[1])
    fill_is_seen = not is_causal or bool((met.keys < met.queries).any())
    mask = None
    if window is not None or (fill_is_seen and not own_keys.all()):
        index = layout.index.cpu()
        mask = own_keys[:, None]
        ahead = index[layout.cp_rank][queries][:, :, None] - index[source][keys][:, None, :]
        mask = mask & (ahead >= 0) if causal else mask
        mask = mask & (ahead.abs() < window) if window is not None else mask
        if not mask.any():
            return None
        mask = mask[:, None].to(device)
    return Block(
        _rows(queries, own_queries, device),
        _rows(keys, own_keys, device),
        is_causal and mask is None,
        mask,
        None if mask is None else ~mask.any(-1),
        None if own_queries.all() else own_queries.to(device),
        None if own_keys.all() else own_keys.to(device),
    )


def _filled(start: Tensor, length: Tensor, longest: int) -> tuple[Int64[Tensor, "m i"], Bool[Tensor, "m i"]]:
    """The rows of every run, the last one repeated up to the longest, and which of them are no such repetition."""
    i = torch.arange(longest)
    return start[:, None] + torch.minimum(i, length[:, None] - 1), i < length[:, None]


def _places(rows: Rows, own: Bool[Tensor, "m i"] | None) -> Places | None:
    """Found once for each block, since it takes a look at the values; None for a slice."""
    if isinstance(rows, slice):
        return None
    flat = rows.flatten()
    if own is None:
        return slice(None), flat
    kept = own.flatten().nonzero().squeeze(1)
    return kept, flat[kept]


def _rows(rows: Int64[Tensor, "m i"], own: Bool[Tensor, "m i"], device: torch.device) -> Rows:
    """One run as a slice, which copies nothing."""
    if len(rows) > 1 or not own.all():
        return rows.to(device)
    return slice(int(rows[0, 0]), int(rows[0, -1]) + 1)
