"""Index arrays for the segments of a rank's stream; a segment is a run of tokens of one sequence.

Each rank sends the final states of `count` segments and receives the states that enter `count` segments. Under
dual_chunk_swap these are both halves of each local sequence. Under contiguous the rank sends the state of the segment
at its last row, which the next rank continues, and receives a state for the segment at its first row. An index one past
the last row means a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from torch_impl.collectives import large_tensors
from torch_impl.contract import Rejected
from torch_impl.layouts import TokenLayout

IN_ORDER = ("contiguous", "ragged")  # kinds of layouts in which a rank holds one run of the stream


@dataclass(frozen=True)
class Blocks:
    """Segments in blocks of equal size: the rows of each block, its segment, and each row's position in all blocks."""

    rows: Int64[Tensor, "m l"]
    segment: Int64[Tensor, " m"]
    index: Int64[Tensor, " t"]


@dataclass(frozen=True)
class Halo:
    """The k - 1 rows before each segment that a state enters, and the stream extended by them.

    `sent` indexes local rows: the last rows of each segment that sends its state. `before` indexes the gathered rows of
    all ranks. `extended` indexes cat(local, before); `ids` are the segments of the extended rows, and `local` the
    positions of the local rows among them.
    """

    sent: Int64[Tensor, " m"]
    before: Int64[Tensor, " m"]
    extended: Int64[Tensor, " j"]
    ids: Int64[Tensor, " j"]
    local: Int64[Tensor, " t"]


@dataclass(frozen=True)
class Segments:
    """The index arrays of one rank; they depend on the layout alone.

    `order` has a row for each sequence, with the segments of all ranks by position; states pass along a row.
    `sequences` has the sequence of each entry. `before` is the number of segments before each local segment in its row.
    """

    count: int
    ids: Int64[Tensor, " t"]
    last: Int64[Tensor, " g"]
    order: Int64[Tensor, "q m"]
    sequences: Int64[Tensor, "q m"]
    before: Int64[Tensor, "q e"]
    leaving: Blocks
    entering: Blocks
    halo: Halo


@dataclass(frozen=True)
class _Spans:
    """Local rows of the segments that send a state and that receive one.

    `segment_of_row` is the sending segment of each row of a rank, and `stops_of_rank` the ends of every rank's sending
    segments. Ranks differ in them only if their shards are ragged.
    """

    ids: Tensor
    starts: Tensor
    stops: Tensor
    entry_starts: Tensor
    entry_stops: Tensor
    segment_of_row: Tensor
    stops_of_rank: Tensor


def segments_of(layout: TokenLayout, d_conv: int, chunk_size: int, device: torch.device) -> Segments:
    """The segments of a layout that has tokens; cached with the layout.

    Cost:   no collective, no host read, no loop over sequences or ranks; n * g indices and a few per local token.
    Errors: ValueError for a layout that is neither contiguous nor dual_chunk_swap.
    """
    _check_order(layout)
    key = "segments", d_conv, chunk_size, device
    return layout.cached(key, lambda: _build(layout.on(device), d_conv, chunk_size))


def halo_of(layout: TokenLayout, d_conv: int, device: torch.device) -> Halo:
    """The halo of a convolution over a layout that has tokens; cached with the layout. Shards may be ragged.

    Cost, errors: as `segments_of`.
    """
    _check_order(layout)

    def build() -> Halo:
        here = layout.on(device)
        return _halo(here, _spans(here), torch.arange(here.counts[here.cp_rank], device=device), d_conv - 1)

    return layout.cached(("halo", d_conv, device), build)


def _check_order(layout: TokenLayout) -> None:
    if layout.kind not in (*IN_ORDER, "dual_chunk_swap", "packed"):
        raise Rejected(
            f"layout={layout.kind!r} shards sequences into more than two runs a rank; use contiguous or dual_chunk_swap"
        )


def _spans(layout: TokenLayout) -> _Spans:
    return (_runs_at_the_ends if layout.kind in IN_ORDER else _halves)(layout)


def with_zeros(x: Float[Tensor, "b t *a"]) -> Float[Tensor, "b t+1 *a"]:
    """x with a row of zeros appended."""
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, 1))


def blocks_of(x: Float[Tensor, "b t *a"], blocks: Blocks) -> Float[Tensor, "b m l *a"]:
    """The rows of each block; padding is zeros."""
    return large_tensors.index_select(with_zeros(x), blocks.rows.flatten(), 1).unflatten(1, blocks.rows.shape)


def _build(layout: TokenLayout, d_conv: int, chunk_size: int) -> Segments:
    # A contiguous shard passes on one state, a DualChunkSwap shard one state for each half of every sequence.
    local, device = layout.total // layout.cp_size, layout.index.device
    spans = _spans(layout)
    order = (_order_of_ranks if layout.kind == "contiguous" else _order_of_halves)(layout, spans)
    count = len(spans.starts)
    size = min(chunk_size, max(local // count, 1))
    everywhere = torch.arange(local, device=device)
    return Segments(
        count,
        spans.ids,
        torch.where(spans.stops > spans.starts, spans.stops - 1, local),
        *order,
        leaving=_blocks(spans.starts, spans.stops, everywhere, size),
        entering=_blocks(spans.entry_starts, spans.entry_stops, everywhere, size),
        halo=_halo(layout, spans, everywhere, d_conv - 1),
    )


def _halves(layout: TokenLayout) -> _Spans:
    """Both chunks of each sequence, at the same local rows on every rank."""
    cu = layout.cu_padded.long() // layout.cp_size
    edges = torch.cat([torch.stack([cu[:-1], cu[:-1] + cu.diff() // 2], 1).flatten(), cu[-1:]])
    starts, stops = edges[:-1], edges[1:]
    rows = torch.arange(layout.total // layout.cp_size, device=cu.device)
    ids = torch.searchsorted(stops.contiguous(), rows, right=True)
    return _Spans(ids, starts, stops, starts, stops, ids, stops.expand(layout.cp_size, -1))


def _runs_at_the_ends(layout: TokenLayout) -> _Spans:
    """The sequence at the last row, which the next rank may continue, and the one at the first row."""
    ids = layout.sequence_ids[layout.local_index]
    # Slices, since a ragged shard may have no rows.
    last, first = (ids != ids[-1:]).sum()[None], (ids == ids[:1]).sum()[None]
    local, counts = torch.full_like(last, len(ids)), torch.tensor(layout.counts, device=ids.device)
    one_segment = ids.new_zeros(max(layout.counts))
    return _Spans(ids, last, local, torch.zeros_like(last), first, one_segment, counts[:, None])


def _order_of_halves(layout: TokenLayout, spans: _Spans) -> tuple[Tensor, Tensor, Tensor]:
    n, count, rank = layout.cp_size, len(spans.starts), layout.cp_rank
    positions = layout.index[:, spans.starts.clamp(max=layout.index.shape[1] - 1)]
    by_position = positions.view(n, -1, 2).transpose(0, 1).flatten(1).argsort(-1)  # 2 * rank + half, per sequence
    sequence = torch.arange(count // 2, device=by_position.device)[:, None]
    # The inverse permutation has the place of this rank's two halves in each sequence.
    before = by_position.argsort(-1)[:, 2 * rank : 2 * rank + 2]
    order = by_position // 2 * count + 2 * sequence + by_position % 2
    return order, sequence.expand_as(order), before


def _order_of_ranks(layout: TokenLayout, spans: _Spans) -> tuple[Tensor, Tensor, Tensor]:
    ids, rank = layout.sequence_ids.view(layout.cp_size, -1), layout.cp_rank
    continues = ids[rank - 1, -1] == ids[rank, 0]  # rank 0 compares with the last rank, but gets 0 below anyway
    return (
        torch.arange(layout.cp_size, device=ids.device)[None],
        ids[None, :, -1],
        torch.where(continues, rank, 0).view(1, 1),
    )


def _blocks(starts: Tensor, stops: Tensor, everywhere: Tensor, size: int) -> Blocks:
    """Segments in blocks of `size` rows, padded with zeros; the number of blocks does not depend on the lengths."""
    local, count = len(everywhere), len(starts)
    # 1. The segment of each block. local // size + count blocks are enough for any lengths, without a host read.
    block_counts = -(-(stops - starts) // size)
    ends = block_counts.cumsum(0)
    block = torch.arange(local // size + count, device=starts.device)
    segment = torch.searchsorted(ends, block, right=True).clamp(max=count - 1)
    # 2. The rows of each block; past its segment's last row, the index of the row of zeros.
    offset = (block - (ends - block_counts)[segment]) * size
    rows = (starts[segment] + offset)[:, None] + torch.arange(size, device=starts.device)
    rows = torch.where(rows < stops[segment][:, None], rows, local)
    # 3. The inverse. Padding is written to index[local], which is dropped.
    index = torch.full((local + 1,), rows.numel(), device=starts.device)
    index[rows.flatten()] = torch.arange(rows.numel(), device=starts.device)
    return Blocks(rows, segment, index[:-1])


def _halo(layout: TokenLayout, spans: _Spans, everywhere: Tensor, width: int) -> Halo:
    local, count, device = len(everywhere), len(spans.starts), everywhere.device
    # 1. The positions before each entered segment, back to the start of its sequence at most.
    entry = spans.entry_starts.clamp(max=max(local - 1, 0))
    position = layout.local_index[entry] if local else torch.zeros_like(entry)
    back = torch.arange(width, 0, -1, device=device)
    halo_position = position[:, None] - back
    sequence_start = layout.cu_padded[layout.sequence_ids[position]]
    exists = (halo_position >= sequence_start[:, None]) & (spans.entry_stops > spans.entry_starts)[:, None]
    # 2. The rank that sends each position, and the index in its message: the last `width` rows of each segment.
    row = layout.inverse[halo_position.clamp(min=0)]
    ends = torch.tensor(layout.counts, device=device).cumsum(0)
    rank = torch.searchsorted(ends, row, right=True)
    row = row - (ends - ends.diff(prepend=ends.new_zeros(1)))[rank]
    segment = spans.segment_of_row[row]
    before = (rank * count + segment) * width + width - (spans.stops_of_rank[rank, segment] - row)
    absent = layout.cp_size * count * width
    # Rows before a short segment's start are also sent, but no rank reads them.
    sent = (spans.stops[:, None] - back).clamp(min=0).flatten()
    # 3. The stream with `width` rows in front of each entered segment.
    local_rows = everywhere + width * torch.searchsorted(spans.entry_starts.contiguous(), everywhere, right=True)
    segments = torch.arange(count, device=device)
    halo_rows = ((spans.entry_starts + segments * width)[:, None] + width - back).flatten()
    extended = torch.empty(local + count * width, dtype=torch.long, device=device)
    extended[local_rows], extended[halo_rows] = everywhere, local + torch.arange(count * width, device=device)
    ids = torch.empty_like(extended)
    entered = layout.sequence_ids[position] if layout.kind in IN_ORDER else segments
    ids[local_rows] = spans.ids
    ids[halo_rows] = entered.repeat_interleave(width, output_size=count * width)
    return Halo(sent, torch.where(exists, before, absent).flatten(), extended, ids, local_rows)
