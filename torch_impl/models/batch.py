"""A batch of packed documents, and the part of it that one rank works on.

Every rank knows the whole batch; rank r of dp takes its streams, rank r of cp its tokens of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from torch_impl.layouts import TokenLayout
from torch_impl.models.loss import NOBODY


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
    kind = "packed" if order == "dual_chunk_swap" else order
    layout = TokenLayout.packed(stream.cu_padded, stream.cu_real, cp_size=cp_size, cp_rank=cp_rank, kind=kind)
    for name, held in (("ids", stream.ids), ("keep", stream.keep)):
        if held is not None and held.shape != (layout.total,):
            raise ValueError(
                f"models.rank_stream: {name} is {list(held.shape)} but cu_padded ends at {layout.total}; pass all of t"
            )
    targets = next_ids(stream, layout)
    return RankStream(layout.shard(stream.ids, 0)[None], layout.shard(targets, 0)[None], layout)


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
