"""A batch of packed documents, and the part of it that one rank works on.

Every rank has the full batch; rank r of dp takes its streams, rank r of cp its tokens of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from torch_impl.contract import NonNegativeInt, PositiveInt, Rejected, contract
from torch_impl.layouts import TokenLayout
from torch_impl.models.config import Placement
from torch_impl.models.loss import IGNORED

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


@dataclass(frozen=True)
class RankStream:
    """The shard of a stream on one cp rank: ids and targets "1 t/cp:LAYOUT", and the layout that shards them."""

    ids: Int[Tensor, "1 l"]
    targets: Int[Tensor, "1 l"]
    layout: TokenLayout


@contract
def rank_stream(stream: Stream, cp_size: int, cp_rank: int, order: str = "dual_chunk_swap") -> RankStream:
    """Shift the targets inside each document, then shard: the next token may be on another rank.

    The targets of a document's last token, of padding, and of tokens that `keep` leaves out are ignored.

    Cost:   no collective; one copy of the offsets to the host.
    Errors: those of `TokenLayout.packed`; ValueError for ids or keep of another length than the stream.
    """
    # 1. The layout, with which ids and keep must agree.
    layout = _layout(stream.cu_padded, stream.cu_real, cp_size, cp_rank, order)
    for name, tensor in (("ids", stream.ids), ("keep", stream.keep)):
        if tensor is not None and tensor.shape != (layout.total,):
            raise Rejected(f"{name} is {list(tensor.shape)} but cu_padded ends at {layout.total}; pass [t]")
    # 2. Targets of the full stream, then the shards of this rank.
    targets = next_ids(stream, layout)
    return RankStream(layout.shard(stream.ids, 0)[None], layout.shard(targets, 0)[None], layout)


def offsets_of(layouts: Sequence[TokenLayout]) -> Int[Tensor, "m 2 q"]:
    """The documents of several streams as one tensor: offsets with padding and without, padded to one length.

    `layout_of` turns any of its rows into a layout again.
    """
    longest = max(len(layout.cu_padded) for layout in layouts)
    rows = [torch.stack([layout.cu_padded, layout.cu_real]) for layout in layouts]
    return torch.stack([pad(row, (0, longest - row.shape[1]), value=FILL) for row in rows])


@contract
def layout_of(offsets: Int[Tensor, "1 2 q"], placement: Placement) -> TokenLayout:
    """The layout of one stream, sharded over the placement's cp in its order.

    Cost:   one copy of the offsets to the host.
    Errors: those of `TokenLayout.packed`; TypeError unless a Tensor; ValueError for the offsets of several streams.
    """
    if not isinstance(offsets, Tensor):
        raise Rejected(f"offsets is a {type(offsets).__name__}; pass a TokenLayout or its offsets", TypeError)
    if offsets.ndim != 3 or offsets.shape[:2] != (1, 2):
        raise Rejected(f"offsets is {list(offsets.shape)}; pass [1, 2, q], those of one stream")
    padded, real = offsets[0].unbind()
    return _layout(padded, real, placement.cp.size(), placement.cp.rank(), placement.order)


def _layout(padded: Tensor, real: Tensor, cp_size: int, cp_rank: int, order: str) -> TokenLayout:
    # A packed stream shards each document by DualChunkSwap, which is a kind of layout of its own.
    kind = "packed" if order == "dual_chunk_swap" else order
    return TokenLayout.packed(padded, real, cp_size=cp_size, cp_rank=cp_rank, kind=kind)


def next_ids(stream: Stream, layout: TokenLayout) -> Int[Tensor, " t"]:
    """The id after each token in its document, IGNORED where there is none or it does not count."""
    real = layout.cu_real.diff()[layout.sequence_ids]
    # The last real token of a document has no next one; the roll gives it padding, or the next document's first id.
    counts = layout.position_ids + 1 < real
    if stream.keep is not None:
        counts = counts & stream.keep
    return torch.where(counts, stream.ids.roll(-1), IGNORED)


@contract
def streams_of_rank(streams: Sequence[Stream], dp_size: PositiveInt, dp_rank: NonNegativeInt) -> list[Stream]:
    """The streams of one dp rank: every dp_size-th one, from number dp_rank on.

    Errors: ValueError for streams that dp ranks cannot divide equally.
    """
    if len(streams) % dp_size:
        raise Rejected(f"{len(streams)} streams cannot be divided by dp={dp_size}; pass a multiple")
    return list(streams[dp_rank::dp_size])
