"""A batch of packed documents, and each rank's part of it.

Every rank has the full batch. A dp rank takes its streams, and a cp rank its tokens of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from torch_impl.contract import Instance, ListOf, NonNegativeInt, PositiveInt, Rejected, contract
from torch_impl.layouts import TokenLayout
from torch_impl.models.config import Placement
from torch_impl.models.loss import IGNORED

Layouts = Annotated[
    Sequence[TokenLayout],
    ListOf(Instance(TokenLayout, "pass a TokenLayout", shows_value=False), "layouts", if_empty="pass one or more"),
]
FILL = -1  # pads the offsets of a stream that has fewer documents than another


@dataclass(frozen=True)
class Stream:
    """One packed stream, unsharded: ids [t], and the offsets of its documents with and without padding.

    `keep` marks the tokens whose prediction counts; None: all.
    """

    ids: Int[Tensor, " t"]
    cu_padded: Int[Tensor, " n"]
    cu_real: Int[Tensor, " n"]
    keep: Bool[Tensor, " t"] | None = None


OneStream = Annotated[Stream, Instance(Stream, "pass a Stream", shows_value=False)]
Streams = Annotated[Sequence[Stream], ListOf(Instance(Stream, "pass a Stream", shows_value=False), "streams")]


@dataclass(frozen=True)
class RankStream:
    """One cp rank's shard of a stream: ids and targets "1 t/cp:LAYOUT", and the layout that shards them."""

    ids: Int[Tensor, "1 l"]
    targets: Int[Tensor, "1 l"]
    layout: TokenLayout


@contract
def rank_stream(stream: OneStream, cp_size: int, cp_rank: int, order: str = "dual_chunk_swap") -> RankStream:
    """Shift the targets inside each document, then shard the stream: the next token may be on another rank.

    The last token of a document, padding, and tokens that `keep` leaves out get an ignored target.

    Cost:   no collective; one copy of the offsets to the host.
    Errors: as `TokenLayout.packed`; ValueError if the length of ids or keep differs from the stream's.
    """
    # 1. The layout; ids and keep must agree with it.
    layout = _layout(stream.cu_padded, stream.cu_real, cp_size, cp_rank, order)
    for name, tensor in (("ids", stream.ids), ("keep", stream.keep)):
        if tensor is not None and tensor.shape != (layout.total,):
            raise Rejected(f"{name} is {list(tensor.shape)} but cu_padded ends at {layout.total}; pass [t]")
    # 2. The targets of the full stream, then this rank's shards.
    targets = next_ids(stream, layout)
    return RankStream(layout.shard(stream.ids, 0)[None], layout.shard(targets, 0)[None], layout)


@contract
def offsets_of(layouts: Layouts) -> Int[Tensor, "m 2 q"]:
    """The documents of several streams as one tensor: padded and real offsets, filled up to one length.

    `layout_of` turns a row back into a layout.

    Errors: TypeError for anything but layouts; ValueError for an empty sequence.
    """
    longest = max(len(layout.cu_padded) for layout in layouts)
    rows = [torch.stack([layout.cu_padded, layout.cu_real]) for layout in layouts]
    return torch.stack([pad(row, (0, longest - row.shape[1]), value=FILL) for row in rows])


@contract
def layout_of(offsets: Int[Tensor, "1 2 q"], placement: Placement) -> TokenLayout:
    """The layout of one stream, from its row of `offsets_of`, sharded over the placement's cp group in its order.

    Cost:   one copy of the offsets to the host.
    Errors: as `TokenLayout.packed`; TypeError unless offsets is a Tensor; ValueError for several streams.
    """
    if not isinstance(offsets, Tensor):
        raise Rejected(f"offsets is a {type(offsets).__name__}; pass a TokenLayout or its offsets", TypeError)
    if offsets.layout is not torch.strided or offsets.is_nested:
        raise Rejected("offsets is no dense tensor; pass [1, 2, q] for one stream", TypeError)
    if offsets.ndim != 3 or offsets.shape[:2] != (1, 2):
        raise Rejected(f"offsets is {list(offsets.shape)}; pass [1, 2, q] for one stream")
    padded, real = offsets[0].unbind()
    return _layout(padded, real, placement.cp.size(), placement.cp.rank(), placement.order)


def _layout(padded: Tensor, real: Tensor, cp_size: int, cp_rank: int, order: str) -> TokenLayout:
    # DualChunkSwap inside each document is a separate kind of layout, `packed`.
    kind = "packed" if order == "dual_chunk_swap" else order
    return TokenLayout.packed(padded, real, cp_size=cp_size, cp_rank=cp_rank, kind=kind)


def next_ids(stream: Stream, layout: TokenLayout) -> Int[Tensor, " t"]:
    """The id after each token in its document; IGNORED if no token follows or `keep` leaves the token out."""
    real = layout.cu_real.diff()[layout.sequence_ids]
    # No token follows the last real one of a document; the roll gives it padding or the next document's first id.
    counts = layout.position_ids + 1 < real
    if stream.keep is not None:
        counts = counts & stream.keep
    return torch.where(counts, stream.ids.roll(-1), IGNORED)


@contract
def streams_of_rank(streams: Streams, dp_size: PositiveInt, dp_rank: NonNegativeInt) -> list[Stream]:
    """The streams of one dp rank: every dp_size-th stream, starting with number dp_rank.

    Errors: ValueError if dp_size does not divide the number of streams.
    """
    if len(streams) % dp_size:
        raise Rejected(f"{len(streams)} streams cannot be divided by dp={dp_size}; pass a multiple")
    return list(streams[dp_rank::dp_size])
