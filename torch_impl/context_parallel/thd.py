"""Rows of packed sequences as one stream of tokens (THD), and such streams in equal chunks.

`input_ids` are [B, S] or [B, S, d]. Row b holds sequences one after another: sequence j has `seq_lens[b, j]` real
tokens in a slot of `seq_lens_padded[b, j]`; entries equal to a negative value of the caller's say there is none.
Memory is indexed by `cu_seqlens_padded` alone; `cu_seqlens` sums up real lengths.

The slots of a batch: which sequences its rows hold, from lengths that are read once, on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.context_parallel.kinds import Batch, checked_tensor
from torch_impl.contract import contract
from torch_impl.layouts import TokenLayout
from torch_impl.layouts.divisibility import check_whole, first

TABLES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
CONSUMED = ("attention_mask", "padding_mask", "seq_lens", "seq_lens_padded", *TABLES)  # some to be made anew


@contract("context_parallel.thd")
def process_input_for_thd(
    batch: Batch, seq_lens_padding_value: int = -1000, padding_token_id: int = 0
) -> dict[str, Any]:
    """One stream of all rows, with its offsets, positions and padding mask.

        input_ids  "b s" or "b s d"   ->   "b*s" or "b*s d";   position_ids  "k b s"   ->   "k 1 b*s"

    Every tensor that starts with [B, S] is flattened so; `attention_mask`, `seq_lens` and `seq_lens_padded` are
    consumed, a `padding_mask` is replaced by that of the lengths, and all else is passed on. A tail that a row's
    padded lengths leave over joins the slot of its last sequence as padding. Positions restart in each slot, unless
    given. The mask comes from the lengths, never from token ids, so that `padding_token_id` is not looked at: nothing
    is padded here.

    >>> ids, lengths = torch.arange(12).view(2, 6), torch.tensor([[3, 2], [6, -1000]])
    >>> slots = torch.tensor([[4, 2], [6, -1000]])
    >>> out = process_input_for_thd({"input_ids": ids, "seq_lens": lengths, "seq_lens_padded": slots})
    >>> out["cu_seqlens"].tolist(), out["cu_seqlens_padded"].tolist()
    ([0, 3, 5, 11], [0, 4, 6, 12])

    Cost:   no collective; views, and one host copy of the lengths.
    Errors: KeyError without input_ids, seq_lens or seq_lens_padded; ValueError for lengths that do not fit the rows
            or each other, a row without any sequence, or a fill that could be a length; TypeError for lengths of no
            integers, a fill that is none, ids, labels, positions or lengths that are no Tensor, or no batch.
    """
    return stream(batch, 1, seq_lens_padding_value).processed()


@contract("context_parallel.thd")
def split_batch_into_thd_chunks(
    batch: Batch, num_chunks: int, seq_lens_padding_value: int = -1000, padding_token_id: int = 0
) -> dict[str, Any]:
    """`process_input_for_thd` of `num_chunks` equal blocks of rows, stacked.

        input_ids  "b s d"   ->   "m b*s/m d"

    Offsets are filled on the right with `seq_lens_padding_value`, and stand nowhere else. A tensor [B, ...] that is
    not by token is split by rows. `num_chunks` of 1 or less is `process_input_for_thd`.

    Cost:   as `process_input_for_thd`.
    Errors: as there; besides ValueError if num_chunks does not divide the rows, or a tensor has other first dims;
            TypeError if it is no integer.
    """
    if checked_chunks(num_chunks) == 1:
        return stream(batch, 1, seq_lens_padding_value).processed()
    made = stream(batch, num_chunks, seq_lens_padding_value)
    return {name: made.stacked(name, value) for name, value in made.processed().items()}


@dataclass(frozen=True)
class Stream:
    """All rows of a batch as one stream. `tokens` are by position of it; `others` are not. Chunks are blocks of it."""

    tokens: Mapping[str, Tensor]
    others: Mapping[str, Any]
    slots: Slots
    chunks: int
    fill: int

    def layout(self, cp_size: int, cp_rank: int) -> TokenLayout:
        """The layout of the stream over a group: since no slot crosses a chunk, the chunks' layouts end to end."""
        cu_padded, cu_real = self.slots.offsets.to(self.tokens["input_ids"].device)
        total = self.slots.total
        return TokenLayout.packed(cu_padded, cu_real, cp_size=cp_size, cp_rank=cp_rank, total=total, validate=False)

    def processed(self) -> dict[str, Any]:
        """The stream uncut."""
        layout = self.layout(1, 0)
        positions = {} if "position_ids" in self.tokens else {"position_ids": layout.position_ids}
        tokens = {**self.tokens, **positions, "padding_mask": layout.padding_mask}
        return {**tokens, **self.others, **self.tables()}

    def tables(self) -> dict[str, Tensor]:
        """Offsets and the longest slot of each chunk; of one chunk without the dim of chunks."""
        made = self.slots.tables(self.chunks, self.fill)
        device = self.tokens["input_ids"].device
        return {name: (x if self.chunks > 1 else x[0]).to(device, torch.int32) for name, x in made.items()}

    def stacked(self, name: str, value: Any) -> Any:
        """A value with the dim of chunks in front."""
        if name in self.others:
            return self._split_rows(name, value)
        if name in TABLES:
            return value
        return by_chunk(name, value, self.chunks)

    def _split_rows(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = self.slots.rows
        if not value.ndim or len(value) != rows:
            raise ValueError(
                f"context_parallel.thd: {name} is {list(value.shape)}, which has no dim of {rows} rows to split into "
                f"num_chunks={self.chunks}; take it out of the batch"
            )
        return value.unflatten(0, (self.chunks, rows // self.chunks))


def by_chunk(name: str, x: Tensor, chunks: int) -> Tensor:
    """A per-token tensor in equal chunks of its stream, the dim of chunks in front."""
    if name == "position_ids" and x.ndim == 3:
        return x.unflatten(2, (chunks, x.shape[2] // chunks)).movedim(2, 0)
    return x.unflatten(0, (chunks, len(x) // chunks))


def stream(batch: Mapping[str, Any], chunks: int, fill: int) -> Stream:
    """The stream of a batch whose lengths and shapes are known to fit."""
    for name in ("input_ids", "seq_lens", "seq_lens_padded"):
        if name not in batch:
            raise KeyError(f"context_parallel.thd: batch has no {name!r}; it has {', '.join(batch) or 'nothing'}")
        checked_tensor("context_parallel.thd", name, batch[name])
    ids = batch["input_ids"]
    if ids.ndim not in (2, 3):
        raise ValueError(f"context_parallel.thd: input_ids is {list(ids.shape)}; it is [b, s] or [b, s, d]")
    chunks = checked_chunks(chunks)
    rows, size = ids.shape[:2]
    if chunks > 1 and rows % chunks:
        raise ValueError(
            f"context_parallel.thd: num_chunks={chunks} does not divide the batch of {rows} rows; drop or add a row"
        )
    slots = checked_slots(batch["seq_lens"], batch["seq_lens_padded"], rows, size, fill)
    tokens, others = {}, {}
    for name, value in batch.items():
        if name in CONSUMED:
            continue
        (tokens if _is_by_token(name, value, rows, size) else others)[name] = value
    flat = {name: _flattened(name, x) for name, x in tokens.items()}
    return Stream(flat, others, slots, chunks, fill)


def checked_chunks(num_chunks: int) -> int:
    """How many chunks: one, if it says less; TypeError for what is no integer."""
    try:
        return max(index(num_chunks), 1)
    except TypeError:
        kind = type(num_chunks).__name__
        raise TypeError(f"context_parallel.thd: num_chunks={num_chunks!r} is a {kind}; pass an int") from None


def _is_by_token(name: str, value: Any, rows: int, size: int) -> bool:
    """Whether a value has one entry for each token; ValueError for labels or positions that have not."""
    if not isinstance(value, Tensor):
        if name in ("labels", "position_ids") and value is not None:
            checked_tensor("context_parallel.thd", name, value)
        return False
    if name == "position_ids" and value.ndim == 3 and value.shape[1:] == (rows, size):
        return True
    if value.shape[:2] == (rows, size):
        return True
    if name in ("labels", "position_ids"):
        raise ValueError(
            f"context_parallel.thd: {name} is {list(value.shape)}, input_ids has [{rows}, {size}] tokens; "
            "give one for each"
        )
    return False


def _flattened(name: str, x: Tensor) -> Tensor:
    """Rows end to end; positions of several kinds [k, B, S] stay by kind."""
    return x.flatten(1, 2)[:, None] if name == "position_ids" and x.ndim == 3 else x.flatten(0, 1)


@dataclass(frozen=True)
class Slots:
    """Sequence i has `real[i]` tokens in a slot of `padded[i]`, in row `row[i]`; the slots of a row fill it."""

    real: Int64[Tensor, " q"]
    padded: Int64[Tensor, " q"]
    row: Int64[Tensor, " q"]
    rows: int
    size: int

    @property
    def total(self) -> int:
        return self.rows * self.size

    @property
    def offsets(self) -> Int64[Tensor, "2 offsets"]:
        """Offsets of the slots in the stream of all rows, and sums of real lengths."""
        return _sums(torch.stack([self.padded, self.real]))

    def tables(self, chunks: int, fill: int) -> dict[str, Tensor]:
        """For each block of rows, the offsets in its own stream, filled on the right, and the longest slot."""
        chunk = self.row // max(self.rows // chunks, 1)
        counts = torch.bincount(chunk, minlength=chunks)
        starts = _sums(counts)[:-1]
        place = torch.arange(len(chunk)) - starts[chunk]
        made = {}
        for name, sums in zip(("cu_seqlens_padded", "cu_seqlens"), self.offsets, strict=True):
            table = torch.full((chunks, int(counts.max()) + 1), fill)
            table[:, 0] = 0
            table[chunk, place + 1] = sums[1:] - sums[starts[chunk]]
            made[name] = table
        longest = torch.zeros(chunks, dtype=torch.int64).scatter_reduce(0, chunk, self.padded, "amax")
        return {"cu_seqlens": made["cu_seqlens"], "cu_seqlens_padded": made["cu_seqlens_padded"], "max_seqlen": longest}


def checked_slots(seq_lens: Tensor, seq_lens_padded: Tensor, rows: int, size: int, fill: int) -> Slots:
    """The slots of `rows` rows of `size` tokens, without filled entries; a row's tail joins its last slot.

    Errors: ValueError for lengths that do not fit; TypeError for lengths or a fill of no integers.
    """
    check_whole("context_parallel.thd: seq_lens_padding_value", fill)
    if fill >= 0:
        raise ValueError(_said(f"seq_lens_padding_value={fill} could be a length; use a negative one"))
    real, padded = _on_host(seq_lens, seq_lens_padded, rows)
    kept = real != fill
    _check_lengths(real, padded, kept, fill)
    left = size - torch.where(kept, padded, 0).sum(1)
    for b in first(left < 0):
        raise ValueError(
            _said(f"row {b}: seq_lens_padded adds up to {size - int(left[b])}, the row has {size} tokens; shorten it")
        )
    for b in first(~kept.any(1) & (left > 0)):
        raise ValueError(_said(f"row {b} has no sequence; give it seq_lens 0 and seq_lens_padded {size}"))
    columns = torch.arange(real.shape[1])
    last = torch.where(kept, columns, -1).amax(1, keepdim=True) if len(columns) else left[:, None]
    padded = padded + torch.where(columns == last, left[:, None], 0)
    return Slots(real[kept], padded[kept], kept.nonzero()[:, 0], rows, size)


def _on_host(seq_lens: Tensor, seq_lens_padded: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Both as int64, by one copy."""
    for name, lengths in (("seq_lens", seq_lens), ("seq_lens_padded", seq_lens_padded)):
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
            raise TypeError(_said(f"{name} is {str(lengths.dtype).removeprefix('torch.')}; lengths are integers"))
        if lengths.ndim != 2 or len(lengths) != rows:
            raise ValueError(_said(f"{name} is {list(lengths.shape)}; it has a row for each of {rows} rows of tokens"))
    if seq_lens.shape != seq_lens_padded.shape:
        raise ValueError(
            _said(
                f"seq_lens is {list(seq_lens.shape)}, seq_lens_padded is {list(seq_lens_padded.shape)}; "
                "give a padded length for each length"
            )
        )
    real, padded = torch.stack([seq_lens, seq_lens_padded.to(seq_lens)]).cpu().long()
    return real, padded


def _check_lengths(real: Tensor, padded: Tensor, kept: Tensor, fill: int) -> None:
    """Filled alike, not negative, and none longer than its slot."""
    wrong = {
        "differ": (kept != (padded != fill), f"both or neither are {fill}; fill both"),
        "negative": (kept & ((real < 0) | (padded < 0)), f"lengths are 0 or more, or {fill} for none"),
        "longer": (kept & (real > padded), "a real length exceeds its padded one; lengthen the slot"),
    }
    for found, rule in wrong.values():
        for b, j in found.nonzero()[:1].tolist():
            what = f"row {b}, sequence {j}: seq_lens is {int(real[b, j])} and seq_lens_padded {int(padded[b, j])}"
            raise ValueError(_said(f"{what}; {rule}"))


def _said(sentence: str) -> str:
    return f"context_parallel.thd: {sentence}"


def _sums(lengths: Tensor) -> Tensor:
    """[0, l0, l0 + l1, ...] along the last dim."""
    return torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))
