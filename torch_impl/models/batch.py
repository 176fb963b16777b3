"""A batch of packed documents, and the part of it that one rank works on.

Every rank knows the whole batch; rank r of dp takes its streams, rank r of cp its tokens of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from torch_impl.layouts import TokenLayout
from torch_impl.models.config import Placement
from torch_impl.models.loss import NOBODY

FILLED = -1  # stands where a stream has fewer documents than another


@dataclass(frozen=True)
class Stream:
    """One packed stream, whole: ids [t], and the offsets of its documents with and without padding.

    `keep` marks tokens whose prediction counts, all if None.
    """

    ids: Int[Tensor, " t"]
    cu_padded: Int[Tensor, " n"]
    cu_real: Int[Tensor, " n"]
    keep: Bool[Tensor, " t"] | None = None


@dataclass(frozen=True)
class RankStream:
    """What one cp rank has of a stream: ids and targets "1 t/cp:LAYOUT", and the layout that cut them."""

    ids: Int[Tensor, "1 l"]
    targets: Int[Tensor, "1 l"]
    layout: TokenLayout


def rank_stream(stream: Stream, cp_size: int, cp_rank: int, order: str = "dual_chunk_swap") -> RankStream:
    """Shift inside each document, then cut: the next token may be another rank's.

    The target of the last token of a document, of padding, and of a token not kept is nobody's.

    Cost:   no collective; one copy of the offsets to the host.
    Errors: those of `TokenLayout.packed`; ValueError for ids or keep of another length than the stream.
    """
    layout = _cut(stream.cu_padded, stream.cu_real, cp_size, cp_rank, order)
    for name, held in (("ids", stream.ids), ("keep", stream.keep)):
        if held is not None and held.shape != (layout.total,):
            raise ValueError(
                f"models.rank_stream: {name} is {list(held.shape)} but cu_padded ends at {layout.total}; pass all of t"
            )
    targets = next_ids(stream, layout)
    return RankStream(layout.shard(stream.ids, 0)[None], layout.shard(targets, 0)[None], layout)


def offsets_of(layouts: Sequence[TokenLayout]) -> Int[Tensor, "m 2 q"]:
    """The documents of several streams as one tensor: offsets with padding and without, filled to one length.

    `layout_of` makes a layout of any of its rows again.
    """
    longest = max(len(layout.cu_padded) for layout in layouts)
    rows = [torch.stack([layout.cu_padded, layout.cu_real]) for layout in layouts]
    return torch.stack([pad(row, (0, longest - row.shape[1]), value=FILLED) for row in rows])


def layout_of(offsets: Int[Tensor, "1 2 q"], placement: Placement) -> TokenLayout:
    """The layout of one stream, cut over the placement's cp in its order.

    Cost:   one copy of the offsets to the host.
    Errors: those of `TokenLayout.packed`; TypeError for offsets of another kind, ValueError for several streams'.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"models.layout_of: offsets is a {type(offsets).__name__}; pass a TokenLayout or its offsets")
    if offsets.ndim != 3 or offsets.shape[:2] != (1, 2):
        raise ValueError(f"models.layout_of: offsets is {list(offsets.shape)}; pass [1, 2, q], those of one stream")
    padded, real = offsets[0].unbind()
    return _cut(padded, real, placement.cp.size(), placement.cp.rank(), placement.order)


def _cut(padded: Tensor, real: Tensor, cp_size: int, cp_rank: int, order: str) -> TokenLayout:
    kind = "packed" if order == "dual_chunk_swap" else order
    return TokenLayout.packed(padded, real, cp_size=cp_size, cp_rank=cp_rank, kind=kind)


def next_ids(stream: Stream, layout: TokenLayout) -> Int[Tensor, " t"]:
    """The id after each token in its own document, nobody's where there is none or it does not count."""
    real = layout.cu_real.diff()[layout.sequence_ids]
    counts = layout.position_ids + 1 < real
    if stream.keep is not None:
        counts = counts & stream.keep
    return torch.where(counts, stream.ids.roll(-1), NOBODY)


def own_streams(streams: Sequence[Stream], dp_size: int, dp_rank: int) -> list[Stream]:
    """The streams of one dp rank: every dp_size-th from its own on.

    Errors: ValueError for streams that dp ranks cannot share equally.
    """
    if len(streams) % dp_size:
        raise ValueError(
            f"models.own_streams: {len(streams)} streams cannot be shared by dp={dp_size}; pass a multiple"
        )
    return list(streams[dp_rank::dp_size])
