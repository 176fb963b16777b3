"""The block schedule of attention: the rows of queries that attend to the rows of keys, for each source rank.

It consists of slices, index arrays and masks; `blockwise_attention` computes with them. Every layout keeps the tokens
of a sequence in order on each rank, so a rank's shard of a sequence is one run of consecutive rows, real tokens first.
The visible pairs of one rank's queries and another rank's keys are then rectangles and triangles: all pairs, half of
the queries, half of the keys, the pairs below a diagonal, or none. So masks are needed only over fill (see below) and
at the edges of a window, where the queries are split into short runs, *segments*. If a sequence continues a prefix,
its queries see all of the prefix's keys in the window.

A block is the input of one call of an attention kernel: runs of queries, each with its run of keys. If runs in a block
have different lengths, their last rows are repeated up to the longest; these repeated rows are the *fill*.
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
MAX_SEGMENT_QUERIES = 256  # the most queries in a segment under a window


@dataclass(frozen=True)
class BlockSchedule:
    """The blocks of one rank, with `blocks[source]` for the keys of rank `source`.

    `counts[r]` is the number of rows of rank r, padding included.
    """

    rank: int
    counts: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]


def schedule_of(layout: TokenLayout, causal: bool, window: int | None) -> BlockSchedule:
    """The block schedule of this rank, cached with the layout: layers that share a layout share the schedule.

    Cost:   one copy of four numbers per rank and sequence to the host (shared prefixes add one copy, and one for each
            rank of cp), and a copy of the positions if masks are computed: over fill in a causal block, and with a
            window shorter than the longest sequence. Work with a window grows with tokens times
            window + MAX_SEGMENT_QUERIES. Besides fill only a window's edges have masks, of at most
            2 * MAX_SEGMENT_QUERIES keys for each run; only a segment with queries from both of DualChunkSwap's chunks
            may have a mask over all keys of the run. Equal masks are shared.
    """
    return layout.cached(("schedule", causal, window), lambda: _schedule(layout, causal, window))


def _schedule(layout: TokenLayout, causal: bool, window: int | None) -> BlockSchedule:
    # 1. Find the run of rows that each rank has of each sequence.
    runs = _Runs.of(layout)
    # 2. Find the keys of each source rank that this rank's queries see, ignoring the window.
    sources = range(layout.cp_size)
    visible = [_visible_runs(layout.kind, runs, layout.cp_rank, source, causal) for source in sources]
    # 3. Drop a window that is as long as the longest sequence: it hides nothing.
    before = layout.lengths_before.cpu() if layout.prefix_of else torch.zeros_like(runs.real[0])
    longest = max((runs.real.sum(0) + before).tolist(), default=0)
    hiding_window = window if window is not None and window < longest else None
    # 4. Batch runs of similar shape into blocks.
    blocks = []
    for source in sources:
        rules = _SourceRules(layout, source, causal, hiding_window)
        prefix_blocks = [_blocks(rules, prefixes, False) for prefixes in _visible_prefix_runs(layout, runs, source)]
        blocks.append(sum(prefix_blocks, _blocks(rules, *visible[source])))
    return BlockSchedule(layout.cp_rank, layout.counts, tuple(blocks))


@dataclass(frozen=True)
class _Runs:
    """The run of rows for every rank and sequence, on the host.

    `start` is the run's first row, `real` its number of real rows, `first_chunk` the number of rows in the first of
    DualChunkSwap's two chunks, and `first_position` the first row's position within the sequence.
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

        # 1. Find where a sequence's rows start and stop on each rank, padding included.
        start, stop = row_of(cu[:-1]), row_of(cu[1:])
        # 2. Add a column for sequences that start after the last row of a rank: the rank has no row of them.
        padded_rows = torch.cat([rows, rows.new_full((n, 1), layout.total)], 1)
        # 3. Chunks are halves of the padded run; real rows end at `ends`. Copy everything to the host at once.
        fields = start, row_of(ends) - start, (stop - start) // 2, padded_rows.gather(1, start) - cu[:-1]
        return _Runs(*torch.stack(fields).cpu())


@dataclass(frozen=True)
class _VisibleRuns:
    """Runs of this rank's queries, each with the visible run of a source's keys: first rows and numbers of rows.

    A sequence has one run or several. If the keys belong to a prefix, and so to another sequence, add `shift` to a
    query's position in the stream to compare it with the keys' positions.
    """

    first_query: Int64[Tensor, " sequences"]
    query_count: Int64[Tensor, " sequences"]
    first_key: Int64[Tensor, " sequences"]
    key_count: Int64[Tensor, " sequences"]
    shift: Int64[Tensor, " sequences"] | None = None

    def subset(self, is_member: Bool[Tensor, " sequences"]) -> _VisibleRuns:
        """The runs that `is_member` selects."""
        shift = None if self.shift is None else self.shift[is_member]
        fields = self.first_query, self.query_count, self.first_key, self.key_count
        return replace(_VisibleRuns(*(x[is_member] for x in fields)), shift=shift)


def _visible_runs(kind: str, runs: _Runs, rank: int, source: int, causal: bool) -> tuple[_VisibleRuns, bool]:
    """The runs of `rank`'s queries and of visible `source` keys; and whether only pairs below the diagonal count."""
    first_query, query_count = runs.start[rank], runs.real[rank]
    first_key, key_count = runs.start[source], runs.real[source]
    # All real queries see all real keys; on this rank itself the kernel applies the diagonal.
    if not causal or rank == source:
        return _VisibleRuns(first_query, query_count, first_key, key_count), causal
    if kind == "striped":
        # Query i of a stripe sees keys 0 to i of an earlier stripe, and keys 0 to i - 1 of a later one: skip the first
        # query there. The source has that many keys: only a later stripe is shorter, by one token at most.
        skipped_queries = (runs.first_position[source] > runs.first_position[rank]).long()
        query_count = (query_count - skipped_queries).clamp(min=0)
        return _VisibleRuns(first_query + skipped_queries, query_count, first_key, query_count), True
    if kind in ("contiguous", "ragged"):
        return _VisibleRuns(first_query, query_count, first_key, key_count * (source < rank)), False
    # DualChunkSwap: rank r of n holds the equally long chunks r and 2 n - 1 - r of each sequence.
    chunk = runs.first_chunk[rank]
    if source < rank:  # the source's first chunk is before both of this rank's chunks, its second after both
        return _VisibleRuns(first_query, query_count, first_key, torch.minimum(key_count, chunk)), False
    # A source after this rank has both chunks between this rank's two: only the second chunk's queries see them.
    return _VisibleRuns(first_query + chunk, (query_count - chunk).clamp(min=0), first_key, key_count), False


def _visible_prefix_runs(layout: TokenLayout, runs: _Runs, source: int) -> Iterator[_VisibleRuns]:
    """The queries of each sequence, and the keys of `source` in the sequences that it continues.

    One item for each level of prefixes, first parents, then grandparents: no query may occur twice in a block.
    """
    levels = prefix_levels(layout.prefix_of)
    # The stream position at which a sequence's prefixes would begin if they stood right before it.
    begin = (layout.cu_padded[:-1].long() - layout.lengths_before).cpu() if levels else torch.zeros(0)
    for level in levels:
        continued, prefix = pairs_of(level)
        queries = runs.start[layout.cp_rank][continued], runs.real[layout.cp_rank][continued]
        keys = runs.start[source][prefix], runs.real[source][prefix]
        yield _VisibleRuns(*queries, *keys, begin[prefix] - begin[continued])


def _ascending_positions(layout: TokenLayout) -> Int64[Tensor, "n local"]:
    """The positions of every rank, ascending for searchsorted: the fill of a ragged row, -1, becomes the largest."""
    return torch.where(layout.index < 0, layout.total, layout.index)


@dataclass(frozen=True)
class _SourceRules:
    """The source rank of the keys, and the rules by which this rank's queries see its keys."""

    layout: TokenLayout
    source: int
    causal: bool
    window: int | None


def _blocks(rules: _SourceRules, visible: _VisibleRuns, is_causal: bool) -> tuple[Block, ...]:
    """All blocks of one source. With a window, blocks at its two edges have masks, and blocks between have none."""
    if rules.window is None:
        return _blocks_by_length(rules, visible, is_causal)
    # Use separate blocks: all rows of a block are merged at once, so no query may occur twice in it.
    first_edge, common, last_edge = _split_by_window(rules, visible, rules.window)
    edges = _blocks_by_length(rules, first_edge, False) + _blocks_by_length(rules, last_edge, False)
    return edges + _blocks_by_length(replace(rules, window=None), common, False)


def _split_by_window(
    rules: _SourceRules, visible: _VisibleRuns, window: int
) -> tuple[_VisibleRuns, _VisibleRuns, _VisibleRuns]:
    """Split runs into segments of at most MAX_SEGMENT_QUERIES queries, each with three ranges of keys.

    They are the first edge, keys that only the first queries of a segment see; the common keys, which all of them see;
    and the last edge, keys that only its last queries see. The two edges need a mask, the common keys do not. If no key
    is common, the first edge takes all visible keys. For a causal segment of queries 10 to 13:

        window 6    first edge 5 to 7     common 8 to 10    last edge 11 to 13
        window 3    first edge 8 to 13    common none       last edge none
    """
    rows = _ascending_positions(rules.layout).cpu()
    query_positions, key_positions = rows[rules.layout.cp_rank], rows[rules.source]
    # 1. Split each run into segments: `run` is a segment's run, `begin` its first query within the run.
    segments = -(-visible.query_count // MAX_SEGMENT_QUERIES)
    run = torch.repeat_interleave(segments)
    begin = (torch.arange(len(run)) - (segments.cumsum(0) - segments)[run]) * MAX_SEGMENT_QUERIES
    first_query = visible.first_query[run] + begin
    query_count = (visible.query_count[run] - begin).clamp(max=MAX_SEGMENT_QUERIES)
    # 2. Find the positions of a segment's first and last query, and the keys of its run.
    shift = torch.zeros_like(run) if visible.shift is None else visible.shift[run]
    first, last = (query_positions[x] + shift for x in (first_query, first_query + query_count - 1))
    first_key, end = visible.first_key[run], (visible.first_key + visible.key_count)[run]

    def key_at(position: Tensor) -> Tensor:
        return torch.searchsorted(key_positions, position).clamp(first_key, end)

    # 3. [start, stop) are the keys that any query of the segment sees; all queries see [common_start, common_stop).
    behind, ahead = window - 1, 0 if rules.causal else window - 1
    start, stop = key_at(first - behind), key_at(last + ahead + 1)
    common_start, common_stop = key_at(last - behind), key_at(first + ahead + 1)
    # 4. If no key is common, the first edge takes all keys, and its mask decides.
    has_common = common_stop > common_start
    common_start, common_stop = (torch.where(has_common, x, stop) for x in (common_start, common_stop))
    # 5. Pair the same queries with each of the three ranges.
    key_ranges = (start, common_start), (common_start, common_stop), (common_stop, stop)
    first_edge, common, last_edge = (
        _VisibleRuns(first_query, query_count, start, stop - start, shift) for start, stop in key_ranges
    )
    return first_edge, common, last_edge


def _blocks_by_length(rules: _SourceRules, visible: _VisibleRuns, is_causal: bool) -> tuple[Block, ...]:
    """One block for all runs of similar lengths; in a layout of one sequence, one block for each run."""
    visible = visible.subset((visible.query_count > 0) & (visible.key_count > 0))
    lengths = torch.stack([visible.query_count, visible.key_count], 1)
    # With one sequence the batch may have several rows: only a block of a single run, a slice, covers all of them.
    block_of_run = torch.arange(len(lengths)) if len(rules.layout.cu_padded) == 2 else _block_of_run(lengths)
    masks: dict[Any, tuple[Tensor, Tensor | None]] = {}
    blocks = []
    for number in range(max(block_of_run.tolist(), default=-1) + 1):
        members = block_of_run == number
        blocks.append(_block(rules, visible.subset(members), lengths[members].amax(0).tolist(), is_causal, masks))
    return tuple(block for block in blocks if block is not None)


def _block_of_run(lengths: Int64[Tensor, "m 2"]) -> Int64[Tensor, " m"]:
    """The index of each run's block, by the run's numbers of queries and keys."""
    distinct, block_of_run = lengths.unique(dim=0, return_inverse=True)
    if len(distinct) > MAX_DISTINCT_LENGTHS:
        powers = (lengths - 0.5).log2().floor()  # - 0.5 puts a power of two into one class with the numbers below it
        block_of_run = powers.unique(dim=0, return_inverse=True)[1]
    return block_of_run


def _block(
    rules: _SourceRules,
    visible: _VisibleRuns,
    shape: list[int],
    is_causal: bool,
    masks: dict[Any, tuple[Tensor, Tensor | None]],
) -> Block | None:
    """The block of these runs, filled up to one `shape` (queries, keys); None if the window hides all keys."""
    device = rules.layout.index.device
    queries, is_query = _fill_runs(visible.first_query, visible.query_count, shape[0])
    keys, is_key = _fill_runs(visible.first_key, visible.key_count, shape[1])
    # Fill is at the end of a run: the kernel's causal mask hides it, unless there are more queries than keys.
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
    """The mask of the keys in its run that each query sees; i is 1 if all queries see the same keys."""
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
    """A mask, and the queries that it leaves without a key. Equal masks share memory, across runs and blocks."""
    if (mask == mask[:1]).all():
        mask = mask[:1]
    key = mask.shape, mask.numpy().tobytes()
    if key not in masks:
        fully_masked = ~mask.any(-1)
        masks[key] = mask[:, None].to(device), fully_masked[:, None].to(device) if fully_masked.any() else None
    return masks[key]


def _fill_runs(start: Tensor, length: Tensor, longest: int) -> tuple[Int64[Tensor, "m i"], Bool[Tensor, "m i"]]:
    """The rows of every run, with its last row repeated up to the longest, and a mask that is False at the repeats."""
    i = torch.arange(longest)
    return start[:, None] + torch.minimum(i, length[:, None] - 1), i < length[:, None]


def _rows(rows: Int64[Tensor, "m i"], is_row: Bool[Tensor, "m i"], device: torch.device) -> Rows:
    """Rows as an index array on the device, or for a single run as a slice, which copies nothing."""
    if len(rows) > 1 or not is_row.all():
        return rows.to(device)
    return slice(int(rows[0, 0]), int(rows[0, -1]) + 1)


Rows = slice | Tensor
# The indices of a flattened block's entries that are not fill, and the row of each.
ScatterIndex = tuple[slice | Tensor, Tensor]
MIN_TRIANGLE_QUERIES = 128  # the fewest queries and keys of a part; a triangle below twice as many is not split


@dataclass(frozen=True)
class Block:
    """Runs of queries, each with its run of keys: the input of one kernel call.

    Rows are one slice, for every row of the batch, or [m, rows]: m runs of a batch of one. With `is_causal` query i of
    a run sees its keys 0 to i. `mask` [m or 1, 1, queries or 1, keys] is True for visible keys, `fully_masked` for
    queries that see no key. `is_query` [m, queries] and `is_key` [m, keys] are False at fill; None if there is none.
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
        """The block's queries that are not fill: their indices in the flattened block, and their rows in q."""
        return _scatter_index(self.queries, self.is_query)

    @cached_property
    def key_scatter(self) -> ScatterIndex | None:
        """The block's keys that are not fill: their indices in the flattened block, and their rows in k and v."""
        return _scatter_index(self.keys, self.is_key)

    @cached_property
    def triangle_blocks(self) -> tuple[Block, ...]:
        """The block with its causal triangle split recursively, into two triangles of half the size and a square.

        This saves work in a kernel that does not skip hidden pairs: if it computes 512 keys at a time, it computes the
        full square for a triangle of 512.
        """
        shortest = min(_length(self.queries), _length(self.keys))
        if not self.is_causal or shortest < 2 * MIN_TRIANGLE_QUERIES:
            return (self,)
        half = shortest // 2
        # The second half's queries see all keys of the first half; the first half's queries see none of the second.
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
    """The rows at these indices of each run."""
    if not isinstance(rows, slice):
        return rows[:, indices]
    stop = rows.stop if indices.stop is None else rows.start + indices.stop
    return slice(rows.start + indices.start, stop)


def _scatter_index(rows: Rows, is_row: Bool[Tensor, "m i"] | None) -> ScatterIndex | None:
    """The indices and rows of entries that are not fill; None for a slice. A block caches it: it reads the device."""
    if isinstance(rows, slice):
        return None
    flat_rows = rows.flatten()
    if is_row is None:
        return slice(None), flat_rows
    flat_index = is_row.flatten().nonzero().squeeze(1)
    return flat_index, flat_rows[flat_index]
