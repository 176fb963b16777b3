"""The slots of a batch: which sequences its rows hold, from lengths that are read once, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts.divisibility import check_whole, first


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
