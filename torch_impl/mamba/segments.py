"""Segments of a rank's stream, as index arrays: runs of one sequence's tokens, which states pass between.

Each rank hands on what `count` segments leave behind and enters as many: under dual_chunk_swap both halves of each
sequence on it, under contiguous the segment at its last row, which the next rank goes on with, and that at its first.
An index one past the last row stands for a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts import TokenLayout
from torch_impl.layouts.kept import KeptBeside

_BUILT = KeptBeside()


@dataclass(frozen=True)
class Blocks:
    """Rows [block, size] of one segment each, the segment of each block, and each row's place in all blocks."""

    rows: Int64[Tensor, "m l"]
    segment: Int64[Tensor, " m"]
    place: Int64[Tensor, " t"]


@dataclass(frozen=True)
class Halo:
    """The k - 1 rows before each entered segment, and the stream with them in it.

    `sent` are own rows, the last of each segment handed on. `taken` are rows of all ranks' in rank order. `joined`
    are rows of cat(own, taken), `ids` their segments and `own` the places of own rows among them.
    """

    sent: Int64[Tensor, " m"]
    taken: Int64[Tensor, " m"]
    joined: Int64[Tensor, " j"]
    ids: Int64[Tensor, " j"]
    own: Int64[Tensor, " t"]


@dataclass(frozen=True)
class Segments:
    """What one rank computes with; all of it depends on the layout alone.

    `order` are segments of all ranks as rows in order of position, `sequences` whose they are; a state passes along
    a row. `before` counts, for each segment entered, the segments of its row that come before it, or is 0.
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
    """Own rows of segments handed on and entered, and for a row of any rank the segment handed on that it is in."""

    ids: Tensor
    starts: Tensor
    stops: Tensor
    entry_starts: Tensor
    entry_stops: Tensor
    segment_of_row: Tensor


def segments_of(layout: TokenLayout, d_conv: int, chunk_size: int, device: torch.device) -> Segments:
    """The segments of a layout with tokens, found once and kept as long as it is.

    Cost:   no collective, no host read, no loop over sequences or ranks; n * g indices and a few for each own token.
    Errors: ValueError for a layout that is neither contiguous nor dual_chunk_swap.
    """
    if layout.kind not in ("contiguous", "dual_chunk_swap", "packed"):
        raise ValueError(
            f"mamba.MambaStatePassing: layout={layout.kind!r} cuts sequences into more than two runs a rank; "
            "use contiguous or dual_chunk_swap"
        )
    key = d_conv, chunk_size, device
    return _BUILT.of(layout, key, lambda: _built(layout.on(device), d_conv, chunk_size))


def _built(layout: TokenLayout, d_conv: int, chunk_size: int) -> Segments:
    local, device = layout.total // layout.cp_size, layout.index.device
    spans = (_whole_runs if layout.kind == "contiguous" else _halves)(layout)
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
    """Both chunks of each sequence; the same own rows on every rank."""
    cu = layout.cu_padded.long() // layout.cp_size
    edges = torch.cat([torch.stack([cu[:-1], cu[:-1] + cu.diff() // 2], 1).flatten(), cu[-1:]])
    starts, stops = edges[:-1], edges[1:]
    rows = torch.arange(layout.total // layout.cp_size, device=cu.device)
    ids = torch.searchsorted(stops.contiguous(), rows, right=True)
    return _Spans(ids, starts, stops, starts, stops, ids)


def _whole_runs(layout: TokenLayout) -> _Spans:
    """The sequence at the last row, which may go on elsewhere, and that at the first, which may come from there."""
    ids = layout.sequence_ids[layout.local_index]
    last, first = (ids != ids[-1]).sum()[None], (ids == ids[0]).sum()[None]
    local = torch.full_like(last, len(ids))
    return _Spans(ids, last, local, torch.zeros_like(last), first, torch.zeros_like(ids))


def _order_of_halves(layout: TokenLayout, spans: _Spans) -> tuple[Tensor, Tensor, Tensor]:
    n, count, rank = layout.cp_size, len(spans.starts), layout.cp_rank
    positions = layout.index[:, spans.starts.clamp(max=layout.index.shape[1] - 1)]
    each = positions.view(n, -1, 2).transpose(0, 1).flatten(1).argsort(-1)  # 2 * rank + half, of each sequence
    sequence = torch.arange(count // 2, device=each.device)[:, None]
    before = each.argsort(-1)[:, 2 * rank : 2 * rank + 2]
    return each // 2 * count + 2 * sequence + each % 2, sequence.expand_as(each), before


def _order_of_ranks(layout: TokenLayout, spans: _Spans) -> tuple[Tensor, Tensor, Tensor]:
    ids, rank = layout.sequence_ids.view(layout.cp_size, -1), layout.cp_rank
    goes_on = ids[rank - 1, -1] == ids[rank, 0]  # at rank 0 none is before, whichever it is
    return (
        torch.arange(layout.cp_size, device=ids.device)[None],
        ids[None, :, -1],
        torch.where(goes_on, rank, 0).view(1, 1),
    )


def _blocks(starts: Tensor, stops: Tensor, everywhere: Tensor, size: int) -> Blocks:
    """Segments in blocks of `size` rows, the last of each filled up with zeros; as many blocks for any lengths."""
    local, count = len(everywhere), len(starts)
    needed = -(-(stops - starts) // size)
    ends = needed.cumsum(0)
    block = torch.arange(local // size + count, device=starts.device)
    segment = torch.searchsorted(ends, block, right=True).clamp(max=count - 1)
    offset = (block - (ends - needed)[segment]) * size
    rows = (starts[segment] + offset)[:, None] + torch.arange(size, device=starts.device)
    rows = torch.where(rows < stops[segment][:, None], rows, local)
    place = torch.full((local + 1,), rows.numel(), device=starts.device)
    place[rows.flatten()] = torch.arange(rows.numel(), device=starts.device)
    return Blocks(rows, segment, place[:-1])


def _halo(layout: TokenLayout, spans: _Spans, everywhere: Tensor, reach: int) -> Halo:
    local, count, device = len(everywhere), len(spans.starts), everywhere.device
    entry = spans.entry_starts.clamp(max=local - 1)
    position = layout.local_index[entry]
    back = torch.arange(reach, 0, -1, device=device)
    wanted = position[:, None] - back
    begins = layout.cu_padded[layout.sequence_ids[position]]
    is_there = (wanted >= begins[:, None]) & (spans.entry_stops > spans.entry_starts)[:, None]
    row = layout.inverse[wanted.clamp(min=0)]
    rank, row = row // local, row % local
    segment = spans.segment_of_row[row]
    taken = (rank * count + segment) * reach + reach - (spans.stops[segment] - row)
    # Rows before a short segment's start are sent too, and nobody takes them.
    sent = (spans.stops[:, None] - back).clamp(min=0).flatten()
    own = everywhere + reach * torch.searchsorted(spans.entry_starts.contiguous(), everywhere, right=True)
    each = torch.arange(count, device=device)
    places = ((spans.entry_starts + each * reach)[:, None] + reach - back).flatten()
    joined = torch.empty(local + count * reach, dtype=torch.long, device=device)
    joined[own], joined[places] = everywhere, local + torch.arange(count * reach, device=device)
    ids = torch.empty_like(joined)
    entered = each if layout.kind != "contiguous" else spans.ids[:1]
    ids[own], ids[places] = spans.ids, entered.repeat_interleave(reach, output_size=count * reach)
    absent = layout.cp_size * count * reach
    return Halo(sent, torch.where(is_there, taken, absent).flatten(), joined, ids, own)
