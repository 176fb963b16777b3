"""The block schedule of attention: which rows of queries attend to which rows of keys, for each source rank.

It consists of slices, index arrays and masks; `blockwise_attention` computes with them. Every layout keeps the tokens
of a sequence in order on each rank, so a rank's shard of a sequence is one run of consecutive rows, real tokens first.
Of the queries of one rank and the keys of another, all pairs count, or those of half of the queries or of half of the
keys, or those below a diagonal, or none: rectangles and triangles. So no mask is needed, except over fill (below) and
at the edges of a window, where the queries are split into short runs, *segments*. Of a prefix that a sequence
continues, its queries see all keys in the window.

A block is what one call of an attention kernel computes: runs of queries, each with its run of keys. Runs of different
lengths in one block are filled up to the longest by repeating their last row; *fill* are these repeated rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_impl.layouts.prefixes import pairs_of, prefix_levels
from torch_impl.layouts.token_layout import TokenLayout

# With more distinct lengths than this, runs up to the same power of two share a block: fewer kernels, some fill.
MAX_DISTINCT_LENGTHS = 8
MAX_SEGMENT_QUERIES = 256  # under a window, whose segments are runs of their own


@dataclass(frozen=True)
class BlockSchedule:
    """The blocks of one rank, `blocks[source]` for the keys of rank `source`.

    `counts[r]` is the number of rows that rank r has, padding included.
    """

    rank: int
    counts: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]


def schedule_of(layout: TokenLayout, causal: bool, window: int | None) -> BlockSchedule:
    """The block schedule of this rank, cached with the layout: layers that share a layout share the schedule.

    Cost:   one copy of four numbers per rank and sequence to the host (with shared prefixes one more, and one for each
            rank of cp), and of the positions where masks are computed:
            over fill of a causal block, and with a window shorter than the longest sequence. Work with a window grows
            with tokens times window + MAX_SEGMENT_QUERIES; besides fill only its edges have masks, of at most
            2 * MAX_SEGMENT_QUERIES keys a run. Only the mask of a segment that has queries of both of
            DualChunkSwap's chunks may have all keys of the run. Equal masks are shared.
    """
    return layout.cached(("schedule", causal, window), lambda: _schedule(layout, causal, window))


def _schedule(layout: TokenLayout, causal: bool, window: int | None) -> BlockSchedule:
    # 1. The run of rows that each rank holds of each sequence.
    runs = _Runs.of(layout)
    # 2. What this rank's queries see of each source rank, without regard to the window.
    sources = range(layout.cp_size)
    visible = [_visible_runs(layout.kind, runs, layout.cp_rank, source, causal) for source in sources]
    # 3. A window as long as the longest sequence hides nothing, so it needs no masks and no short runs.
    before = layout.lengths_before.cpu() if layout.prefix_of else torch.zeros_like(runs.real[0])
    longest = max((runs.real.sum(0) + before).tolist(), default=0)
    hiding_window = window if window is not None and window < longest else None
    # 4. Runs of equal shape batched into blocks.
    blocks = []
    for source in sources:
        rules = _SourceRules(layout, source, causal, hiding_window)
        of_prefixes = [_blocks(rules, prefixes, False) for prefixes in _visible_prefix_runs(layout, runs, source)]
        blocks.append(sum(of_prefixes, _blocks(rules, *visible[source])))
    return BlockSchedule(layout.cp_rank, layout.counts, tuple(blocks))


@dataclass(frozen=True)
class _Runs:
    """The run of rows of every rank and sequence, on the host.

    `start` is its first row, `real` its number of real rows, `first_chunk` the number of rows of the first of
    DualChunkSwap's two chunks, and `first_position` the position of its first row within the sequence.
    """

    start: Int64[Tensor, "n sequences"]
    real: Int64[Tensor, "n sequences"]
    first_chunk: Int64[Tensor, "n sequences"]
    first_position: Int64[Tensor, "n sequences"]

    @staticmethod
    def of(layout: TokenLayout) -> _Runs:
        cu, rows = layout.cu_padded.long(), _ascending_positions(layout)
        n, ends = len(rows), cu[:-1] + layout.cu_real.long().diff()

        def row_of(position: Tensor) -> Tensor:
            return torch.searchsorted(rows, position.expand(n, -1).contiguous())

        # 1. On each rank, where the rows of a sequence start and stop, its padding included.
        start, stop = row_of(cu[:-1]), row_of(cu[1:])
        # 2. One column more, for a sequence that starts behind the last row of a rank, which holds nothing of it.
        padded_rows = torch.cat([rows, rows.new_full((n, 1), layout.total)], 1)
        # 3. Chunks are halves of the padded run; real rows end at `ends`. One copy takes all to the host.
        fields = start, row_of(ends) - start, (stop - start) // 2, padded_rows.gather(1, start) - cu[:-1]
        return _Runs(*torch.stack(fields).cpu())


@dataclass(frozen=True)
class _VisibleRuns:
    """Runs of this rank's queries, each with the run of a source's keys that it sees: first rows, and how many.

    There is one for each sequence, or several.

    `shift` added to the position of a query in the stream is its position in that of the keys, which are of another
    sequence if they are a prefix.
    """

    first_query: Int64[Tensor, " sequences"]
    query_count: Int64[Tensor, " sequences"]
    first_key: Int64[Tensor, " sequences"]
    key_count: Int64[Tensor, " sequences"]
    shift: Int64[Tensor, " sequences"] | None = None

    def subset(self, is_member: Bool[Tensor, " sequences"]) -> _VisibleRuns:
        """Those runs that `is_member` selects."""
        shift = None if self.shift is None else self.shift[is_member]
        fields = self.first_query, self.query_count, self.first_key, self.key_count
        return replace(_VisibleRuns(*(x[is_member] for x in fields)), shift=shift)


def _visible_runs(kind: str, runs: _Runs, rank: int, source: int, causal: bool) -> tuple[_VisibleRuns, bool]:
    """The queries of `rank` and the keys of `source` that they see; and whether only those below the diagonal."""
    first_query, query_count = runs.start[rank], runs.real[rank]
    first_key, key_count = runs.start[source], runs.real[source]
    # All real queries and keys; on this rank itself the kernel applies the diagonal.
    if not causal or rank == source:
        return _VisibleRuns(first_query, query_count, first_key, key_count), causal
    if kind == "striped":
        # Query i of a stripe sees keys 0 to i of an earlier stripe, and keys 0 to i - 1 of a later one: there the
        # first query is left out. The source has as many keys as that: a stripe is at most one token shorter than
        # another, and only if it is the later one.
        skipped_queries = (runs.first_position[source] > runs.first_position[rank]).long()
        query_count = (query_count - skipped_queries).clamp(min=0)
        return _VisibleRuns(first_query + skipped_queries, query_count, first_key, query_count), True
    if kind in ("contiguous", "ragged"):
        return _VisibleRuns(first_query, query_count, first_key, key_count * (source < rank)), False
    # DualChunkSwap: rank r of n holds chunks r and 2 n - 1 - r of each sequence, which are equally long.
    chunk = runs.first_chunk[rank]
    if source < rank:  # its first chunk is before both of this rank's chunks, its second one after both
        return _VisibleRuns(first_query, query_count, first_key, torch.minimum(key_count, chunk)), False
    # A source after this rank has both of its chunks between this rank's two: its keys are for the second one.
    return _VisibleRuns(first_query + chunk, (query_count - chunk).clamp(min=0), first_key, key_count), False


def _visible_prefix_runs(layout: TokenLayout, runs: _Runs, source: int) -> Iterator[_VisibleRuns]:
    """The queries of each sequence and the keys of `source` that it has of what it continues.

    One level of prefixes at a time, parent and then grandparent, since no query may occur twice in a block.
    """
    levels = prefix_levels(layout.prefix_of)
    # The position of the stream where what a sequence continues would begin, if it stood right before it.
    begin = (layout.cu_padded[:-1].long() - layout.lengths_before).cpu() if levels else torch.zeros(0)
    for level in levels:
        continued, prefix = pairs_of(level)
        queries = runs.start[layout.cp_rank][continued], runs.real[layout.cp_rank][continued]
        keys = runs.start[source][prefix], runs.real[source][prefix]
        yield _VisibleRuns(*queries, *keys, begin[prefix] - begin[continued])


def _ascending_positions(layout: TokenLayout) -> Int64[Tensor, "n local"]:
    """The positions of every rank, ascending as searchsorted needs: the -1 that fill a ragged row become largest."""
    return torch.where(layout.index < 0, layout.total, layout.index)


@dataclass(frozen=True)
class _SourceRules:
    """The source rank of the keys, and the rules by which this rank's queries see them."""

    layout: TokenLayout
    source: int
    causal: bool
    window: int | None


def _blocks(rules: _SourceRules, visible: _VisibleRuns, is_causal: bool) -> tuple[Block, ...]:
    """All blocks of one source. With a window: those of its two edges, with masks, and those between, without."""
    if rules.window is None:
        return _blocks_by_length(rules, visible, is_causal)
    # Separate blocks, since no query may occur twice in one: all rows of a block are merged at once.
    first_edge, common, last_edge = _split_by_window(rules, visible, rules.window)
    edges = _blocks_by_length(rules, first_edge, False) + _blocks_by_length(rules, last_edge, False)
    return edges + _blocks_by_length(replace(rules, window=None), common, False)


def _split_by_window(
    rules: _SourceRules, visible: _VisibleRuns, window: int
) -> tuple[_VisibleRuns, _VisibleRuns, _VisibleRuns]:
    """Split runs into segments of at most MAX_SEGMENT_QUERIES queries, each with three ranges of keys.

    They are the first edge, keys that only the first queries of a segment see; the common keys, which all of them see;
    and the last edge, keys that only its last queries see. The two edges need a mask, the common keys do not. If no key
    is common, the first edge takes all that any query sees. Of a segment of queries 10 to 13, causal:

        window 6    first edge 5 to 7     common 8 to 10    last edge 11 to 13
        window 3    first edge 8 to 13    common none       last edge none
    """
    rows = _ascending_positions(rules.layout).cpu()
    query_positions, key_positions = rows[rules.layout.cp_rank], rows[rules.source]
    # 1. Split each run into segments: `run` is the run of a segment, `begin` its first query within the run.
    segments = -(-visible.query_count // MAX_SEGMENT_QUERIES)
    run = torch.repeat_interleave(segments)
    begin = (torch.arange(len(run)) - (segments.cumsum(0) - segments)[run]) * MAX_SEGMENT_QUERIES
    first_query = visible.first_query[run] + begin
    query_count = (visible.query_count[run] - begin).clamp(max=MAX_SEGMENT_QUERIES)
    # 2. The positions of the first and last query of a segment, and the keys of its run.
    shift = torch.zeros_like(run) if visible.shift is None else visible.shift[run]
    first, last = (query_positions[x] + shift for x in (first_query, first_query + query_count - 1))
    first_key, end = visible.first_key[run], (visible.first_key + visible.key_count)[run]

    def key_at(position: Tensor) -> Tensor:
        return torch.searchsorted(key_positions, position).clamp(first_key, end)

    # 3. [start, stop) are the keys that any query of the segment sees, [common_start, common_stop) those that all see.
    behind, ahead = window - 1, 0 if rules.causal else window - 1
    start, stop = key_at(first - behind), key_at(last + ahead + 1)
    common_start, common_stop = key_at(last - behind), key_at(first + ahead + 1)
    # 4. If no key is seen by all, the first edge takes them all, and its mask decides.
    has_common = common_stop > common_start
    common_start, common_stop = (torch.where(has_common, x, stop) for x in (common_start, common_stop))
    # 5. The same queries, three times, with each range.
    key_ranges = (start, common_start), (common_start, common_stop), (common_stop, stop)
    first_edge, common, last_edge = (
        _VisibleRuns(first_query, query_count, start, stop - start, shift) for start, stop in key_ranges
    )
    return first_edge, common, last_edge


def _blocks_by_length(rules: _SourceRules, visible: _VisibleRuns, is_causal: bool) -> tuple[Block, ...]:
    """One block for all runs of similar lengths; in a layout of one sequence, one block for each run."""
    visible = visible.subset((visible.query_count > 0) & (visible.key_count > 0))
    lengths = torch.stack([visible.query_count, visible.key_count], 1)
    # With one sequence the batch may have several rows. Only a block of a single run, a slice, covers all of them.
    block_of_run = torch.arange(len(lengths)) if len(rules.layout.cu_padded) == 2 else _block_of_run(lengths)
    masks: dict[Any, tuple[Tensor, Tensor | None]] = {}
    blocks = []
    for number in range(max(block_of_run.tolist(), default=-1) + 1):
        members = block_of_run == number
        blocks.append(_block(rules, visible.subset(members), lengths[members].amax(0).tolist(), is_causal, masks))
    return tuple(block for block in blocks if block is not None)


def _block_of_run(lengths: Int64[Tensor, "m 2"]) -> Int64[Tensor, " m"]:
    """The index of the block that each run goes into, by its numbers of queries and keys."""
    distinct, block_of_run = lengths.unique(dim=0, return_inverse=True)
    if len(distinct) > MAX_DISTINCT_LENGTHS:
        powers = (lengths - 0.5).log2().floor()  # less 0.5, so that a power of two is in one class with those below it
        block_of_run = powers.unique(dim=0, return_inverse=True)[1]
    return block_of_run


def _block(
    rules: _SourceRules,
    visible: _VisibleRuns,
    shape: list[int],
    is_causal: bool,
    masks: dict[Any, tuple[Tensor, Tensor | None]],
) -> Block | None:
    """The block of some runs, filled up to one `shape` (queries, keys); None if the window hides all keys."""
    device = rules.layout.index.device
    queries, is_query = _fill_runs(visible.first_query, visible.query_count, shape[0])
    keys, is_key = _fill_runs(visible.first_key, visible.key_count, shape[1])
    # Keys that fill a run come last: the kernel's causal mask hides them, unless there are more queries than keys.
    has_visible_fill = not is_causal or bool((visible.key_count < visible.query_count).any())
    mask = fully_masked = None
    if rules.window is not None or (has_visible_fill and not is_key.all()):
        mask = _key_mask(rules, queries, keys, is_key, is_causal, visible.shift)
        if not mask.any():
            return None
        mask, fully_masked = _shared_mask(mask, masks, device)
    return Block(
        _rows(queries, is_query, device),
        _rows(keys, is_key, device),
        is_causal and mask is None,
        mask,
        fully_masked,
        None if is_query.all() else is_query.to(device),
        None if is_key.all() else is_key.to(device),
    )


def _key_mask(
    rules: _SourceRules, queries: Tensor, keys: Tensor, is_key: Tensor, is_causal: bool, shift: Tensor | None
) -> Bool[Tensor, "m i j"]:
    """Which keys of its run each query sees; i is 1 where all queries see the same."""
    mask = is_key[:, None]
    if rules.window is None and not is_causal:
        return mask
    index = rules.layout.index.cpu().int()
    distance = index[rules.layout.cp_rank][queries][:, :, None] - index[rules.source][keys][:, None, :]
    distance = distance if shift is None else distance + shift[:, None, None]
    mask = mask & (distance >= 0) if rules.causal else mask
    return mask & (distance.abs() < rules.window) if rules.window is not None else mask


def _shared_mask(
    mask: Bool[Tensor, "m i j"], masks: dict[Any, tuple[Tensor, Tensor | None]], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """A mask and the queries that it leaves without a key; equal masks share memory, over runs and over blocks."""
    if (mask == mask[:1]).all():
        mask = mask[:1]
    key = mask.shape, mask.numpy().tobytes()
    if key not in masks:
        fully_masked = ~mask.any(-1)
        masks[key] = mask[:, None].to(device), fully_masked[:, None].to(device) if fully_masked.any() else None
    return masks[key]


def _fill_runs(start: Tensor, length: Tensor, longest: int) -> tuple[Int64[Tensor, "m i"], Bool[Tensor, "m i"]]:
    """The rows of every run, its last row repeated up to the longest, and a mask that is False at the repeats."""
    i = torch.arange(longest)
    return start[:, None] + torch.minimum(i, length[:, None] - 1), i < length[:, None]


def _rows(rows: Int64[Tensor, "m i"], is_row: Bool[Tensor, "m i"], device: torch.device) -> Rows:
    """Rows as an index array on the device, or as a slice for a single run: slicing copies nothing."""
    if len(rows) > 1 or not is_row.all():
        return rows.to(device)
    return slice(int(rows[0, 0]), int(rows[0, -1]) + 1)


Rows = slice | Tensor
# Where the entries of a flattened block belong: indices of those that are not fill, and the row of each.
ScatterIndex = tuple[slice | Tensor, Tensor]
MIN_TRIANGLE_QUERIES = 128  # and keys, of the smallest part; a triangle of fewer than twice as many is not split


@dataclass(frozen=True)
class Block:
    """Runs of queries, each with its run of keys: the input of one kernel call.

    Rows are one slice, for every row of the batch, or [m, rows]: m runs of a batch of one. `is_causal`: query i of a
    run sees its keys 0 to i. `mask` [m or 1, 1, queries or 1, keys] is True where a key is seen, `fully_masked` where a
    query sees none. `is_query` [m, queries] and `is_key` [m, keys] are False at rows that fill up a shorter run; None
    if there is no fill.
    """

    queries: Rows
    keys: Rows
    is_causal: bool = False
    mask: Bool[Tensor, "#m 1 #i j"] | None = None
    fully_masked: Bool[Tensor, "#m 1 #i"] | None = None
    is_query: Bool[Tensor, "m i"] | None = None
    is_key: Bool[Tensor, "m j"] | None = None

    @cached_property
    def query_scatter(self) -> ScatterIndex | None:
        """The queries of the block that are not fill: their indices in the flattened block, and their rows in q."""
        return _scatter_index(self.queries, self.is_query)

    @cached_property
    def key_scatter(self) -> ScatterIndex | None:
        """The same for the keys."""
        return _scatter_index(self.keys, self.is_key)

    @cached_property
    def triangle_blocks(self) -> tuple[Block, ...]:
        """The same pairs of queries and keys: a causal triangle as two of half its size and a square, and so on.

        It saves work in a kernel that does not skip hidden pairs: one that computes 512 keys at a time computes the
        full square for a triangle of 512.
        """
        shortest = min(_length(self.queries), _length(self.keys))
        if not self.is_causal or shortest < 2 * MIN_TRIANGLE_QUERIES:
            return (self,)
        half = shortest // 2
        # Queries of the second half see all keys of the first; those of the first half see no key of the second.
        first, second = slice(0, half), slice(half, None)
        blocks = (
            self._sub_block(first, first),
            self._sub_block(second, first, is_causal=False),
            self._sub_block(second, second),
        )
        return tuple(smaller for block in blocks for smaller in block.triangle_blocks)

    def _sub_block(self, queries: slice, keys: slice, is_causal: bool = True) -> Block:
        is_query = None if self.is_query is None else self.is_query[:, queries]
        is_key = None if self.is_key is None else self.is_key[:, keys]
        rows = _sub_rows(self.queries, queries), _sub_rows(self.keys, keys)
        return replace(self, queries=rows[0], keys=rows[1], is_causal=is_causal, is_query=is_query, is_key=is_key)


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.shape[1]


def _sub_rows(rows: Rows, indices: slice) -> Rows:
    """Those of the rows at the indices `indices` of each run."""
    if not isinstance(rows, slice):
        return rows[:, indices]
    stop = rows.stop if indices.stop is None else rows.start + indices.stop
    return slice(rows.start + indices.start, stop)


def _scatter_index(rows: Rows, is_row: Bool[Tensor, "m i"] | None) -> ScatterIndex | None:
    """Indices and rows of what is not fill; None for a slice. Reads values on the host, so a block caches it."""
    if isinstance(rows, slice):
        return None
    flat_rows = rows.flatten()
    if is_row is None:
        return slice(None), flat_rows
    flat_index = is_row.flatten().nonzero().squeeze(1)
    return flat_index, flat_rows[flat_index]
