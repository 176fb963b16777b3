"""Packed rows as one stream of tokens (THD), or as equal chunks of such a stream.

`input_ids` are [B, S] or [B, S, d]. Row b holds sequences one after another: sequence j has `seq_lens[b, j]` real
tokens in a slot of `seq_lens_padded[b, j]` tokens. Both tables have a negative fill value in rows with fewer sequences.
A batch may also have `prefix_of` [B, q]: the earlier sequence of the row that each sequence continues, or -1. This
describes several responses to one prompt, which the row has once. Only `cu_seqlens_padded` indexes memory; `cu_seqlens`
are the sums of real lengths.

The lengths are read once, on the host, into `Slots`, and everything else is computed from them. They are NumPy arrays:
for a thousand numbers a torch operation takes three times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.context_parallel.batch_layout import BatchLayout
from torch_impl.context_parallel.kinds import Batch, require_tensor
from torch_impl.contract import Rejected, contract, dtype_name, is_integer
from torch_impl.layouts import TokenLayout

FUNCTION = "context_parallel.thd"
TABLES = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
PREFIXES = "prefix_of"
# Entries that are not passed on: the lengths, and entries that are computed from them or replaced.
CONSUMED = ("attention_mask", "padding_mask", "seq_lens", "seq_lens_padded", PREFIXES, *TABLES)


@overload
def process_input_for_thd(
    batch: Batch, seq_lens_padding_value: int = ..., padding_token_id: int = ...
) -> dict[str, Any]: ...
@overload
def process_input_for_thd(
    batch: Batch, seq_lens_padding_value: int = ..., padding_token_id: int = ..., *, return_layout: Literal[True]
) -> tuple[dict[str, Any], BatchLayout]: ...
@contract(FUNCTION)
def process_input_for_thd(
    batch: Batch, seq_lens_padding_value: int = -1000, padding_token_id: int = 0, *, return_layout: bool = False
) -> dict[str, Any] | tuple[dict[str, Any], BatchLayout]:
    """Flatten packed rows into one stream, with its offsets, positions and padding mask.

        input_ids  "b s" or "b s d"   ->   "b*s" or "b*s d";   position_ids  "k b s"   ->   "k 1 b*s"

    Every tensor with leading dims [B, S] is flattened in the same way; `attention_mask`, `seq_lens` and
    `seq_lens_padded` are consumed, a `padding_mask` is recomputed from the lengths, and all other entries are passed
    on. If a row's padded lengths leave a tail, it joins the slot of its last sequence as padding. Positions restart in
    each slot, unless the batch has `position_ids`. The mask comes from the lengths, never from token ids, and nothing
    is padded here, so `padding_token_id` is not used. With `return_layout` the batch's BatchLayout for one rank is
    returned after the batch.

    With `prefix_of` a sequence's positions continue its prefix's. The result has the table in the stream's numbering of
    sequences, with the same fill as the offsets. Offsets cannot express prefixes, so ask for the layout and pass it to
    attention.

    >>> ids, lengths = torch.arange(12).view(2, 6), torch.tensor([[3, 2], [6, -1000]])
    >>> slots = torch.tensor([[4, 2], [6, -1000]])
    >>> out = process_input_for_thd({"input_ids": ids, "seq_lens": lengths, "seq_lens_padded": slots})
    >>> out["cu_seqlens"].tolist(), out["cu_seqlens_padded"].tolist()
    ([0, 3, 5, 11], [0, 4, 6, 12])

    Cost:   no collective; views, and one host copy of the lengths.
    Errors: KeyError without input_ids, seq_lens or seq_lens_padded; ValueError for lengths that do not fit the rows
            or each other, a row without any sequence, a fill that could be a length, or prefixes that are not earlier
            sequences of the row or come without `return_layout`; TypeError for lengths, prefixes or a fill that are
            not integers, ids, labels, positions or lengths that are not Tensors, or a batch that is not a dict.
    """
    rows = stream(batch, 1, seq_lens_padding_value)
    require_layout(batch, return_layout)
    return (rows.processed(), rows.batch_layout()) if return_layout else rows.processed()


@overload
def split_batch_into_thd_chunks(
    batch: Batch, num_chunks: int, seq_lens_padding_value: int = ..., padding_token_id: int = ...
) -> dict[str, Any]: ...
@overload
def split_batch_into_thd_chunks(
    batch: Batch,
    num_chunks: int,
    seq_lens_padding_value: int = ...,
    padding_token_id: int = ...,
    *,
    return_layout: Literal[True],
) -> tuple[dict[str, Any], BatchLayout]: ...
@contract(FUNCTION)
def split_batch_into_thd_chunks(
    batch: Batch,
    num_chunks: int,
    seq_lens_padding_value: int = -1000,
    padding_token_id: int = 0,
    *,
    return_layout: bool = False,
) -> dict[str, Any] | tuple[dict[str, Any], BatchLayout]:
    """Flatten `num_chunks` equal blocks of packed rows into streams, and stack them.

        input_ids  "b s d"   ->   "m b*s/m d"

    Offsets are filled at their end with `seq_lens_padding_value`. A tensor [B, ...] that is not by token is split by
    rows. A `num_chunks` of 1 or less gives the result of `process_input_for_thd`. With `return_layout` the batch's
    BatchLayout for one rank is returned after the batch. `padding_token_id` is not used.

    Cost:   as `process_input_for_thd`.
    Errors: as `process_input_for_thd`; ValueError if num_chunks does not divide the rows or a tensor has other first
            dims; TypeError if it is not an integer.
    """
    # Rows are split evenly, so the chunks of the whole stream are the streams of the blocks.
    all_rows = stream(batch, num_chunks, seq_lens_padding_value)
    require_layout(batch, return_layout)
    result = all_rows.processed()
    if all_rows.chunks > 1:
        result = {name: all_rows.stacked(name, value) for name, value in result.items()}
    return (result, all_rows.batch_layout()) if return_layout else result


@dataclass(frozen=True)
class Stream:
    """All rows of a batch as one stream. `tokens` have an entry per position, `constants` do not; a chunk is a block of
    rows."""

    tokens: Mapping[str, Tensor]
    constants: Mapping[str, Any]
    slots: Slots
    chunks: int
    fill: int

    def layout(self, cp_size: int, cp_rank: int) -> TokenLayout:
        """The layout of the stream over a group. No slot crosses a chunk, so it also shards each chunk."""
        # Do not validate again: `slots_of_lengths` did so on the host, and reading the device's offsets would wait.
        cu_padded, cu_real = torch.from_numpy(self.slots.sums).to(self.tokens["input_ids"].device)
        total = self.slots.total
        layout = TokenLayout.packed(cu_padded, cu_real, cp_size=cp_size, cp_rank=cp_rank, total=total, validate=False)
        if self.slots.prefix_of is None:
            return layout
        return replace(layout, prefix_of=tuple(self.slots.prefix_of.tolist()))

    def batch_layout(self, cp_size: int = 1, cp_rank: int = 0, group: ProcessGroup | None = None) -> BatchLayout:
        """The layout of the batch over a group, in the coordinates of the batch's rows."""
        shape = self.slots.rows, self.slots.size
        return BatchLayout(self.layout(cp_size, cp_rank), shape, group, self.chunks, is_stream=True)

    def processed(self) -> dict[str, Any]:
        """The full, unsharded stream as a batch."""
        positions = {} if "position_ids" in self.tokens else {"position_ids": self.layout(1, 0).position_ids}
        padding_mask = self.slots.padding_mask.to(self.tokens["input_ids"].device)
        tokens = {**self.tokens, **positions, "padding_mask": padding_mask}
        return {**tokens, **self.constants, **self.tables()}

    def tables(self) -> dict[str, Tensor]:
        """The offsets, longest slot and prefixes of each chunk; a single chunk has no dim of chunks."""
        by_chunks = self.slots.tables(self.chunks, self.fill)
        device = self.tokens["input_ids"].device
        return {name: torch.from_numpy(x if self.chunks > 1 else x[0, ...]).to(device) for name, x in by_chunks.items()}

    def stacked(self, name: str, value: Any) -> Any:
        """A value of the batch with the dim of chunks in front; tables already have it."""
        if name in self.constants:
            return self._split_rows(name, value)
        if name in (*TABLES, PREFIXES):
            return value
        return by_chunk(name, value, self.chunks)

    def _split_rows(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = self.slots.rows
        if not value.ndim or len(value) != rows:
            lacks = f"has no dim of {rows} rows to split into num_chunks={self.chunks}"
            raise Rejected(f"{name} is {list(value.shape)}, which {lacks}; take it out of the batch")
        return value.unflatten(0, (self.chunks, rows // self.chunks))


def by_chunk(name: str, x: Tensor, chunks: int) -> Tensor:
    """Split a tensor by token into equal chunks of its stream, with the dim of chunks in front."""
    # Positions of several kinds are [k, 1, t]: dim 2 is the stream.
    if name == "position_ids" and x.ndim == 3:
        return x.unflatten(2, (chunks, x.shape[2] // chunks)).movedim(2, 0)
    return x.unflatten(0, (chunks, len(x) // chunks))


def stream(batch: Mapping[str, Any], chunks: int, fill: int) -> Stream:
    """Validate the keys, shapes and lengths of a batch, and return its stream."""
    # 1. Check the keys and the shape of the tokens.
    for name in ("input_ids", "seq_lens", "seq_lens_padded"):
        if name not in batch:
            raise Rejected(f"batch has no {name!r}; it has {', '.join(batch) or 'nothing'}; add it", KeyError)
        require_tensor(name, batch[name])
    ids, chunks = batch["input_ids"], max(index(chunks), 1)
    if ids.ndim not in (2, 3):
        raise Rejected(f"input_ids is {list(ids.shape)}; it is [b, s] or [b, s, d]")
    rows, size = ids.shape[:2]
    if rows % chunks:
        batch_of = f"num_chunks={chunks} does not divide the batch of {rows} rows"
        raise Rejected(f"{batch_of}; drop or add a row")
    # 2. Read the slots, with one copy of the lengths to the host.
    slots = slots_of_lengths(batch["seq_lens"], batch["seq_lens_padded"], rows, size, fill)
    if PREFIXES in batch:
        slots = replace(slots, prefix_of=_prefixes_of_stream(batch[PREFIXES], batch["seq_lens"], fill))
    # 3. Flatten tensors by token into one stream, as views; pass everything else on.
    tokens, unflattened = {}, {}
    for name, value in batch.items():
        if name in CONSUMED:
            continue
        (tokens if _is_by_token(name, value, rows, size) else unflattened)[name] = value
    flat = {name: _flatten_rows(name, x) for name, x in tokens.items()}
    return Stream(flat, unflattened, slots, chunks, fill)


def _is_by_token(name: str, value: Any, rows: int, size: int) -> bool:
    """Whether a value has one entry for each token; ValueError for labels or positions that do not."""
    # Reject such labels and positions: passed on, they would no longer belong to the tokens.
    if not isinstance(value, Tensor):
        if name in ("labels", "position_ids") and value is not None:
            require_tensor(name, value)
        return False
    if name == "position_ids" and value.ndim == 3 and value.shape[1:] == (rows, size):
        return True
    if value.shape[:2] == (rows, size):
        return True
    if name in ("labels", "position_ids"):
        tokens = f"input_ids has [{rows}, {size}] tokens"
        raise Rejected(f"{name} is {list(value.shape)}, {tokens}; give one for each")
    return False


def _flatten_rows(name: str, x: Tensor) -> Tensor:
    """Concatenate rows; positions of several kinds, [k, B, S], become [k, 1, B * S]."""
    return x.flatten(1, 2)[:, None] if name == "position_ids" and x.ndim == 3 else x.flatten(0, 1)


@dataclass(frozen=True)
class Slots:
    """The slots of a batch, on the host: slot i has `runs[i]` = (real tokens, padding), and `padded[i]` is their sum.

    The slots fill `rows` rows of `size` tokens; `is_slot` marks their entries in the tables of lengths. `prefix_of[i]`
    is the sequence that sequence i continues, or -1; it is None if the batch has no prefixes.
    """

    runs: Int64[np.ndarray, "q 2"]
    padded: Int64[np.ndarray, " q"]
    is_slot: Bool[np.ndarray, "rows entries"]
    rows: int
    size: int
    prefix_of: Int64[np.ndarray, " q"] | None = None

    @property
    def total(self) -> int:
        return self.rows * self.size

    @cached_property
    def sums(self) -> Int64[np.ndarray, "2 offsets"]:
        """The offsets of the slots in the stream of all rows, and the cumulative sums of real lengths."""
        sums = np.zeros((2, len(self.padded) + 1), dtype=np.int64)
        np.add.accumulate(self.padded, out=sums[0, 1:])
        np.add.accumulate(self.runs[:, 0], out=sums[1, 1:])
        return sums

    @property
    def padding_mask(self) -> Bool[Tensor, " total"]:
        """True at the stream's padding. Each slot has real tokens, then padding."""
        is_padding = np.zeros(self.runs.size, dtype=bool)
        is_padding[1::2] = True
        return torch.from_numpy(is_padding.repeat(self.runs.ravel()))

    def tables(self, chunks: int, fill: int) -> dict[str, Int32[np.ndarray, "chunks *offsets"]]:
        """The tables of `Stream.tables`, stacked by chunk; offsets and prefixes are filled at their end."""
        # 1. Find the slots of each chunk, from one bound to the next.
        ends = self.is_slot.reshape(chunks, -1).sum(1).cumsum().tolist() if chunks > 1 else [len(self.padded)]
        chunk_slots = list(pairwise([0, *ends]))
        # 2. Compute their offsets, from 0 in each chunk.
        if chunks == 1:  # nothing to subtract or to fill
            by_table = self.sums[:, None].astype(np.int32)
        else:
            by_table = np.full((2, chunks, 1 + max(end - start for start, end in chunk_slots)), fill, dtype=np.int32)
            for chunk, (start, end) in enumerate(chunk_slots):
                sums = self.sums[:, start : end + 1]
                by_table[:, chunk, : sums.shape[1]] = sums - sums[:, :1]
        longest = [self.padded[start:end].max(initial=0) for start, end in chunk_slots]
        tables = {
            "cu_seqlens": by_table[1],
            "cu_seqlens_padded": by_table[0],
            "max_seqlen": np.array(longest, dtype=np.int32),
        }
        if self.prefix_of is None:
            return tables
        # 3. Renumber prefixes within the chunk; a row, and so a sequence with its prefix, is in one chunk.
        prefixes = np.full((chunks, by_table.shape[2] - 1), fill, dtype=np.int32)
        for chunk, (start, end) in enumerate(chunk_slots):
            chunk_prefixes = self.prefix_of[start:end]
            prefixes[chunk, : end - start] = np.where(chunk_prefixes < 0, -1, chunk_prefixes - start)
        return {**tables, PREFIXES: prefixes}


def slots_of_lengths(seq_lens: Tensor, seq_lens_padded: Tensor, rows: int, size: int, fill: int) -> Slots:
    """The slots of `rows` rows of `size` tokens, without the fill; a row's tail joins its last slot.

    Errors: ValueError for lengths that do not fit; TypeError for lengths or a fill that are not integers.
    """
    # 1. Copy both tables to the host at once, as int64. Fill cannot be a length, so an entry is one or the other.
    for name, lengths in (("seq_lens", seq_lens), ("seq_lens_padded", seq_lens_padded)):
        if not is_integer(lengths):
            raise Rejected(f"{name} is {dtype_name(lengths)}; lengths are integers", TypeError)
    if problem := _table_problem(seq_lens, seq_lens_padded, rows, fill):
        raise Rejected(problem)
    real, padded = _on_host(seq_lens, seq_lens_padded)
    # 2. Find the slots, and the tail of each row after its slots.
    is_slot = real != fill
    slots = padded[is_slot]
    runs = np.empty((len(slots), 2), dtype=np.int64)
    runs[:, 0] = real[is_slot]
    np.subtract(slots, runs[:, 0], out=runs[:, 1])
    tail = size - padded.sum(1, where=is_slot)
    # If no run is negative, no slot has a negative length, and so no slot is fill.
    fits = runs.min(initial=0) >= 0 and np.count_nonzero(padded == fill) == real.size - len(slots)
    has_slots = is_slot.any(1) if np.count_nonzero(tail) else None  # None where the slots fill every row
    if not fits or (has_slots is not None and ((tail < 0) | ((tail > 0) & ~has_slots)).any()):
        problem = next(_length_problems(real, padded, is_slot, tail, fill, size))
        raise Rejected(problem)
    # 3. Extend the last slot of each row by the tail.
    if has_slots is not None:
        last, added = is_slot.sum(1).cumsum()[has_slots] - 1, tail[has_slots]  # a row without slots has no tail
        slots[last] += added
        runs[last, 1] += added
    return Slots(runs, slots, is_slot, rows, size)


def _on_host(a: Tensor, b: Tensor) -> tuple[Int64[np.ndarray, "b q"], Int64[np.ndarray, "b q"]]:
    """Two tables of one shape as int64 on the host, with one copy if they are on a device."""
    if a.is_cpu and b.is_cpu:
        return a.long().numpy(), b.long().numpy()
    on_host = torch.stack([a.long(), b.long()]).cpu().numpy()
    return on_host[0], on_host[1]


def require_layout(batch: Mapping[str, Any], is_returned: bool) -> None:
    """ValueError for prefixes without `return_layout`: offsets alone make each continuation a separate sequence."""
    if PREFIXES in batch and not is_returned:
        cannot = f"batch has {PREFIXES!r}, which offsets cannot express"
        raise Rejected(f"{cannot}; pass return_layout=True and give attention the layout's tokens")


def _prefixes_of_stream(prefix_of: Any, seq_lens: Tensor, fill: int) -> Int64[np.ndarray, " q"]:
    """Renumber the rows' prefixes by sequences in the stream of all rows, and drop the fill.

    Errors: TypeError unless prefix_of is a Tensor of integers; ValueError if its shape differs from the lengths', or
            for a prefix that is not an earlier sequence of its row.
    """
    require_tensor(PREFIXES, prefix_of)
    if not is_integer(prefix_of):
        raise Rejected(f"{PREFIXES} is {dtype_name(prefix_of)}; it has numbers of sequences, or -1", TypeError)
    if prefix_of.shape != seq_lens.shape:
        shapes = f"{PREFIXES} is {list(prefix_of.shape)}, seq_lens is {list(seq_lens.shape)}"
        raise Rejected(f"{shapes}; give one for each sequence, -1 for none")
    real, parents = _on_host(seq_lens, prefix_of)
    # Fill may stand between sequences: `number` counts the sequences before an entry, and a prefix is not fill.
    is_slot = real != fill
    number = is_slot.ravel().cumsum().reshape(is_slot.shape) - 1
    rows, entries = np.indices(real.shape)
    is_earlier = (parents >= 0) & (parents < entries)
    parent_entries = np.where(is_earlier, parents, 0)
    is_continued = is_earlier & is_slot[rows, parent_entries]
    for b, j in np.argwhere(is_slot & ~is_continued & (parents != -1))[:1].tolist():
        what = f"row {b}: sequence {j} continues {int(parents[b, j])}"
        raise Rejected(f"{PREFIXES}: {what}; pass an earlier sequence of the row, or -1 for none")
    return np.where(is_continued, number[rows, parent_entries], -1)[is_slot]


def _table_problem(seq_lens: Tensor, seq_lens_padded: Tensor, rows: int, fill: int) -> str | None:
    """Why the shapes of two tables of lengths do not fit a batch of `rows` rows; None if they do."""
    if fill >= 0:
        return f"seq_lens_padding_value={fill} could be a length; use a negative one"
    for name, lengths in (("seq_lens", seq_lens), ("seq_lens_padded", seq_lens_padded)):
        if lengths.ndim != 2 or len(lengths) != rows:
            return f"{name} is {list(lengths.shape)}; it has a row for each of {rows} rows of tokens"
    if seq_lens.shape != seq_lens_padded.shape:
        shapes = f"seq_lens is {list(seq_lens.shape)}, seq_lens_padded is {list(seq_lens_padded.shape)}"
        return f"{shapes}; give a padded length for each length"
    return None


def _length_problems(
    real: np.ndarray, padded: np.ndarray, is_slot: np.ndarray, tail: np.ndarray, fill: int, size: int
) -> Iterator[str]:
    """The problems of lengths: fill in one table only, negative lengths, lengths above their slot, too long slots."""
    rules = (
        (is_slot != (padded != fill), f"both or neither are {fill}; fill both"),
        (is_slot & ((real < 0) | (padded < 0)), f"lengths are 0 or more, or {fill} for none"),
        (is_slot & (real > padded), "a real length exceeds its padded one; lengthen the slot"),
    )
    for violations, rule in rules:
        for b, j in np.argwhere(violations)[:1].tolist():
            lengths = f"seq_lens is {int(real[b, j])} and seq_lens_padded {int(padded[b, j])}"
            yield f"row {b}, sequence {j}: {lengths}; {rule}"
    for b in np.flatnonzero(tail < 0)[:1]:
        yield f"row {b}: seq_lens_padded adds up to {size - int(tail[b])}, the row has {size} tokens; shorten it"
    # In a row without slots, the tail has no slot to join.
    for b in np.flatnonzero(~is_slot.any(1) & (tail > 0))[:1]:
        yield f"row {b} has no sequence; give it seq_lens 0 and seq_lens_padded {size}"
