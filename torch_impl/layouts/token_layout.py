"""Where the tokens of one batch live: the positions of every rank, sequences and padding, built once and used by all.

`index[r]` are the global positions that cp rank r holds, in its local order. Sequence j stands at
`cu_padded[j]:cu_padded[j + 1]` of the global stream, and its first `cu_real[j + 1] - cu_real[j]` tokens are real.
A dense row is one sequence.

The fields of a TokenLayout from lengths or offsets: checked on the host, computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int32, Int64, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

from torch_impl.collectives import all_gather
from torch_impl.collectives.arguments import checked_dim, checked_group, checked_type
from torch_impl.kernels import rows_at
from torch_impl.layouts.cache import Value, cached, cached_tensor, for_training, has_numbers
from torch_impl.layouts.divisibility import (
    check_row,
    check_whole,
    checked_offsets,
    first,
    host_offsets,
    needs,
    offsets_of,
    stripped,
    uncuttable,
)
from torch_impl.layouts.index_arrays import ALPHABET, contiguous, inverted, packed_rows, ragged, striped


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The positions that each of `cp_size` ranks holds, and what stands there; `cp_rank` is the one asking.

    `total` counts global tokens, padding included; `counts` those of each rank; a row of `index` beyond its count
    (ragged only) is -1. All tensors stand on one device; what is derived is built on first use and kept.

    >>> layout = TokenLayout.packed([0, 4, 12], cp_size=2, cp_rank=0)
    >>> layout.index.tolist()
    [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    >>> layout.draw()
    '0110|00111100'
    """

    kind: str
    cp_size: int
    cp_rank: int
    total: int
    index: Int64[Tensor, "n local"]
    cu_padded: Int32[Tensor, " offsets"]
    cu_real: Int32[Tensor, " offsets"]
    counts: tuple[int, ...]
    _derived: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)

    @staticmethod
    @for_training
    def dense(
        kind: str,
        length: int,
        *,
        cp_size: int,
        cp_rank: int,
        device: torch.device | str | None = None,
        real_length: int | None = None,
        counts: Sequence[int] | None = None,
    ) -> TokenLayout:
        """One sequence of `length` tokens, the first `real_length` of them real (all, if not said).

        `kind` is contiguous, ragged, dual_chunk_swap or striped; `counts` are the tokens of each rank, for ragged
        only (DTensor's ceil rule, if not said). One rank alone takes any length.

        >>> TokenLayout.dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0).local_index
        tensor([0, 1, 6, 7])

        Errors: ValueError for another kind, a rank that is none, a length that cannot be cut, or counts that do
                not add up; TypeError for a length, count, size or rank that is no integer.
        """
        return dense_cut(kind, length, cp_size, cp_rank, device, real_length, counts)

    @staticmethod
    @for_training
    def packed(
        cu_padded: Tensor | Sequence[int],
        cu_real: Tensor | Sequence[int] | None = None,
        *,
        cp_size: int,
        cp_rank: int,
        kind: str = "packed",
        total: int | None = None,
        validate: bool = True,
    ) -> TokenLayout:
        """Sequences one after another: `cu_padded` are their offsets in the stream, `cu_real` sums of real lengths.

        `kind` packed cuts each sequence by DualChunkSwap; contiguous and striped cut the stream and ignore where
        sequences end. Offsets may be filled on the right with any negative number. Stands where the offsets do.

        >>> TokenLayout.packed([0, 4, 6, 12], [0, 3, 5, 11], cp_size=1, cp_rank=0).padding_mask.nonzero().flatten()
        tensor([3])

        Cost:   one copy of the offsets to the host; of tensors with `total` and `validate=False` none, and of what
                they hold on a device nothing is checked: there a total that is not their last makes rows without
                meaning, if it can be cut at all. Build it once for a batch: each call builds a layout of its own.
        Errors: ValueError for another kind, a rank that is none, offsets that do not rise from 0 to total, a real
                length above its padded one, a padded length that cannot be cut, real lengths of other sequences;
                TypeError for offsets of no integers, or a size or rank that is none.
        """
        return packed_cut(kind, cu_padded, cu_real, cp_size, cp_rank, total, validate)

    def derived(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """What `build` makes of this layout, once for each key: a schedule, the same layout elsewhere."""
        if not has_numbers():
            return build()
        if key not in self._derived:
            # Dynamo traces no change of inference mode; what it traces needs none.
            self._derived[key] = build() if torch.compiler.is_compiling() else for_training(build)()
        return self._derived[key]

    @cached_tensor
    def local_index(self) -> Int64[Tensor, " local"]:
        """Global positions that this rank holds, in local order."""
        return self.index[self.cp_rank, : self.counts[self.cp_rank]]

    @cached_tensor
    def inverse(self) -> Int64[Tensor, " total"]:
        """Row of each position in cat(rank 0, rank 1, ...): `sequential = rank_major[inverse]`."""
        return inverted(self._everywhere if self.is_identity else self.index.flatten())

    @cached_tensor
    def sequence_ids(self) -> Int64[Tensor, " total"]:
        """The sequence of each global position."""
        return torch.searchsorted(self.cu_padded[1:].long(), self._everywhere, right=True)

    @cached_tensor
    def position_ids(self) -> Int64[Tensor, " total"]:
        """Place of each global position inside its sequence; runs on through the padding."""
        return self._everywhere - self.cu_padded.long()[self.sequence_ids]

    @cached_tensor
    def padding_mask(self) -> Bool[Tensor, " total"]:
        """True where a global position is padding."""
        return self.position_ids >= self.cu_real.diff()[self.sequence_ids]

    @cached_tensor
    def local_cu(self) -> Int32[Tensor, " offsets"]:
        """Offsets of the sequences in this rank's own stream, padding included."""
        own = self.sequence_ids[self.local_index]
        each = torch.arange(len(self.cu_padded), device=own.device)
        return torch.searchsorted(own, each, out_int32=True)

    @property
    def is_identity(self) -> bool:
        """Whether the ranks' streams, laid end to end, are the global stream."""
        return self.cp_size == 1 or self.kind in ("contiguous", "ragged")

    @cached_tensor
    def original_length(self) -> int:
        """Global positions up to the last real token. One read of the offsets."""
        ends = self.cu_padded[:-1] + self.cu_real.diff()
        return max(torch.where(self.cu_real.diff() > 0, ends, 0).tolist(), default=0)

    @cached_tensor
    def _everywhere(self) -> Int64[Tensor, " total"]:
        return torch.arange(self.total, device=self.index.device)

    def shard(self, x: Shaped[Tensor, "*a"], dim: int) -> Shaped[Tensor, "*b"]:
        """This rank's rows of a whole tensor, along `dim`.

            x  "t cp=R"   ->   "t/cp:LAYOUT"

        Any dtype, which is kept; differentiable.

        Cost:   no collective; one copy of the shard.
        Errors: ValueError if x lacks the dim or has not `total` rows along it.
        """
        dim = checked_dim("TokenLayout.shard", "dim", dim, x)
        self._check_rows("shard", x, dim, self.total, "global")
        return rows_at(x, self.local_index, dim)

    def unshard(
        self,
        x: Shaped[Tensor, "*a"],
        dim: int,
        group: ProcessGroup,
        *,
        trim: bool = False,
        gradient: Literal["R", "I"] = "R",
    ) -> Shaped[Tensor, "*b"]:
        """The whole tensor, in global order along `dim`; with `trim` without the padding at its end.

            x  "t/cp:LAYOUT"   ->   "t cp=R"  or, with gradient="I",  "t cp=I"

        With R cotangents are addends: each rank's rows of their sum over cp. With I they are equal: its own rows.

        Cost:   forward 1 all_gather of the longest shard; backward 1 reduce_scatter (R, summed in float32 or
                wider) or none (I). Saves the index.
        Errors: TypeError if group is no ProcessGroup; ValueError for another gradient type, a group of other ranks
                than the layout's, or rows that are not this rank's.
        """
        function = "TokenLayout.unshard"
        group, gradient = checked_group(function, "group", group), checked_type(function, gradient)
        if (group.size(), group.rank()) != (self.cp_size, self.cp_rank):
            raise ValueError(
                f"{function}: group has cp={group.size()} and rank {group.rank()}, "
                f"the layout is for cp={self.cp_size} and rank {self.cp_rank}; rebind it"
            )
        dim = checked_dim(function, "dim", dim, x)
        self._check_rows("unshard", x, dim, self.counts[self.cp_rank], "local")
        rank_major = all_gather(x, group, out=gradient, dim=dim, lengths=self.counts)
        whole = rows_at(rank_major, self.inverse, dim)
        return whole.narrow(dim, 0, self.original_length) if trim else whole

    def draw(self) -> str:
        """The rank that holds each position, in base 36 (`?` from rank 36), with `|` between sequences."""
        ranks = torch.arange(self.cp_size).repeat_interleave(torch.tensor(self.counts), output_size=self.total)
        owners = ranks[self.inverse.cpu()].tolist()
        text = "".join(ALPHABET[rank] if rank < len(ALPHABET) else "?" for rank in owners)
        cu = self.cu_padded.tolist()
        return "|".join(text[start:stop] for start, stop in pairwise(cu))

    @for_training
    def on(self, device: torch.device | str) -> TokenLayout:
        """The same layout with its tensors on another device."""
        index, padded, real = self.index.to(device), self.cu_padded.to(device), self.cu_real.to(device)
        return replace(self, index=index, cu_padded=padded, cu_real=real)

    @for_training
    def rebind(self, cp_size: int, cp_rank: int) -> TokenLayout:
        """The same tokens cut over another group; ragged counts follow DTensor's ceil rule.

        Errors: ValueError for a rank that is none, or a length that cannot be cut over `cp_size`.
        """
        return recut(self.kind, self.total, cp_size, cp_rank, self.cu_padded, self.cu_real)

    def _check_rows(self, function: str, x: Tensor, dim: int, rows: int, where: str) -> None:
        if x.shape[dim] != rows:
            raise ValueError(
                f"TokenLayout.{function}: x has {x.shape[dim]} rows along dim {dim}, the layout {rows} {where} ones; "
                "pass the tensor it was made for"
            )


@cached
def dense_layout(kind: str, length: int, cp_size: int, cp_rank: int, device: torch.device) -> TokenLayout:
    """One object for all calls of one shape, so that what is derived from it is derived once: a memo."""
    return TokenLayout.dense(kind, length, cp_size=cp_size, cp_rank=cp_rank, device=device)


DENSE = ("contiguous", "dual_chunk_swap", "ragged", "striped")
PACKED = ("contiguous", "packed", "striped")
STREAM = {"contiguous": contiguous, "striped": striped}  # cut as one piece


def dense_cut(
    kind: str,
    length: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str | None,
    real_length: int | None,
    counts: Sequence[int] | None,
) -> TokenLayout:
    """One sequence."""
    _check_kind("dense", kind, DENSE)
    _check_rank(cp_size, cp_rank)
    real = length if real_length is None else real_length
    check_whole("s", length)
    check_whole("real_length", real)
    if reason := uncuttable("s", length, "cp", cp_size, kind) if _multiple(kind, cp_size) > 1 or length < 0 else None:
        raise ValueError(reason)
    if not 0 <= real <= length:
        raise ValueError(f"real_length={real} is outside s={length}; it counts the tokens that are no padding")
    if counts is not None and kind != "ragged":
        raise ValueError(f"counts={counts} are for ragged, the layout is {kind}; leave them out")
    cu = torch.tensor([[0, length], [0, real]], device=device)
    if kind != "ragged":
        return _cut(kind, length, cp_size, cp_rank, cu[0], cu[1])
    pieces = ragged(length, cp_size, counts, device=device)
    index = pad_sequence(pieces, batch_first=True, padding_value=-1)
    held = tuple(len(piece) for piece in pieces)
    return TokenLayout(kind, cp_size, cp_rank, length, index, cu[0].int(), cu[1].int(), held)


def packed_cut(
    kind: str,
    cu_padded: Tensor | Sequence[int],
    cu_real: Tensor | Sequence[int] | None,
    cp_size: int,
    cp_rank: int,
    total: int | None,
    validate: bool,
) -> TokenLayout:
    """Sequences by their offsets."""
    _check_kind("packed", kind, PACKED)
    _check_rank(cp_size, cp_rank)
    offsets_of("TokenLayout.packed: cu_padded", cu_padded)
    if cu_real is not None:
        offsets_of("TokenLayout.packed: cu_real", cu_real)
    if not validate and total is not None and isinstance(cu_padded, Tensor):  # a list is on the host, to be checked
        check_row("cu_seqlens", cu_padded)
        _check_total(kind, cu_padded, total, cp_size)
        padded = real = _unfilled(cu_padded, total)
        if cu_real is not None:
            given = torch.as_tensor(cu_real)
            check_row("cu_real", given)
            real = _unfilled(given, None)
        if real.shape != padded.shape:
            raise ValueError(f"cu_real: {len(real)} offsets, the padded ones are {len(padded)}; give as many")
        return _cut(kind, total, cp_size, cp_rank, padded, real.to(padded.device))
    multiple = _multiple(kind, cp_size) if kind == "packed" else 1
    padded = checked_offsets(stripped(cu_padded), total, cp_size, axis="cp", multiple=multiple)
    size = int(padded[-1])
    if reason := uncuttable("t", size, "cp", cp_size, kind):
        raise ValueError(reason)
    real = padded if cu_real is None else _checked_real(stripped(cu_real), padded)
    device = cu_padded.device if isinstance(cu_padded, Tensor) else None
    return _cut(kind, size, cp_size, cp_rank, padded.to(device), real.to(device))


def recut(kind: str, total: int, cp_size: int, cp_rank: int, cu_padded: Tensor, cu_real: Tensor) -> TokenLayout:
    """The same tokens over another group."""
    if kind in ("ragged", "dual_chunk_swap"):
        real = int(cu_real[-1])
        return dense_cut(kind, total, cp_size, cp_rank, cu_padded.device, real, None)
    return packed_cut(kind, cu_padded, cu_real, cp_size, cp_rank, total, True)


def _cut(kind: str, total: int, cp_size: int, cp_rank: int, padded: Tensor, real: Tensor) -> TokenLayout:
    """Equal shares, from offsets that are known to cut."""
    if kind in STREAM:
        index = torch.stack(STREAM[kind](total, cp_size, device=padded.device))
    else:
        index = packed_rows(padded.long(), total, cp_size, torch.arange(cp_size, device=padded.device)[:, None])
    # copies: a layout stays as it is when the caller writes into the offsets
    cu_padded, cu_real = padded.to(torch.int32, copy=True), real.to(torch.int32, copy=True)
    return TokenLayout(kind, cp_size, cp_rank, total, index, cu_padded, cu_real, (total // cp_size,) * cp_size)


def _multiple(kind: str, cp_size: int) -> int:
    """The multiple that a sequence must be; one rank alone holds all of it, of any length."""
    if cp_size == 1 or kind == "ragged":
        return 1
    return needs("dual_chunk_swap", cp_size) if kind == "packed" else needs(kind, cp_size)


def _check_total(kind: str, offsets: Tensor, total: int, cp_size: int) -> None:
    """What can be known of a total without a copy to the host: whether it can be cut; of offsets there, their end."""
    check_whole("total", total)
    multiple = _multiple(kind, cp_size)
    if total < 0 or total % multiple:
        raise ValueError(
            f"total={total} cannot be cut by {kind} over cp={cp_size} (needs a multiple of {multiple}); "
            "pass where the padded offsets end"
        )
    is_here = type(offsets) is Tensor and offsets.device.type == "cpu"
    if is_here and (end := int(offsets.max())) != total:
        raise ValueError(f"cu_seqlens ends at {end} but the stream holds {total} tokens; pass the padded offsets")


def _unfilled(offsets: Tensor, end: int | None) -> Tensor:
    """Fill on the right becomes empty sequences at the end, which needs no look at the values."""
    last = offsets.max() if end is None else end
    return torch.where(offsets < 0, last, offsets)


def _checked_real(cu_real: Tensor, padded: Tensor) -> Tensor:
    """The sums of real lengths, one for each padded one and none above it."""
    real = host_offsets(cu_real, "cu_real")
    if len(real) != len(padded):
        raise ValueError(
            f"cu_real: {len(real) - 1} sequences, the padded offsets have {len(padded) - 1}; give one length for each"
        )
    for j in first(real.diff() > padded.diff()):
        length, slot = int(real.diff()[j]), int(padded.diff()[j])
        raise ValueError(f"cu_real: sequence {j}: real length {length} exceeds its padded length {slot}")
    return real


def _check_kind(constructor: str, kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(f"TokenLayout.{constructor}: kind={kind!r} is not one of {', '.join(known)}")


def _check_rank(cp_size: int, cp_rank: int) -> None:
    check_whole("cp", cp_size)
    check_whole("cp_rank", cp_rank)
    if cp_size < 1:
        raise ValueError(f"cp={cp_size} is not a number of ranks; it is 1 or more")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not in cp={cp_size}; ranks are 0 to {cp_size - 1}")
