"""The fields of a TokenLayout from lengths or offsets: checked on the host, computed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torch_impl.layouts.contiguous import contiguous
from torch_impl.layouts.needs import check_whole, needs, uncuttable
from torch_impl.layouts.packed import check_row, checked_offsets, first, host_offsets, offsets_of, rows
from torch_impl.layouts.ragged import ragged
from torch_impl.layouts.striped import striped

DENSE = ("contiguous", "dual_chunk_swap", "ragged", "striped")
PACKED = ("contiguous", "packed", "striped")
STREAM = {"contiguous": contiguous, "striped": striped}  # cut as one piece


class Cut(NamedTuple):
    """The fields of a TokenLayout, in their order."""

    kind: str
    cp_size: int
    cp_rank: int
    total: int
    index: Int64[Tensor, "n local"]
    cu_padded: Int32[Tensor, " offsets"]
    cu_real: Int32[Tensor, " offsets"]
    counts: tuple[int, ...]


def dense_cut(
    kind: str,
    length: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str | None,
    real_length: int | None,
    counts: Sequence[int] | None,
) -> Cut:
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
    return Cut(kind, cp_size, cp_rank, length, index, cu[0].int(), cu[1].int(), held)


def packed_cut(
    kind: str,
    cu_padded: Tensor | Sequence[int],
    cu_real: Tensor | Sequence[int] | None,
    cp_size: int,
    cp_rank: int,
    total: int | None,
    validate: bool,
) -> Cut:
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


def recut(kind: str, total: int, cp_size: int, cp_rank: int, cu_padded: Tensor, cu_real: Tensor) -> Cut:
    """The same tokens over another group."""
    if kind in ("ragged", "dual_chunk_swap"):
        real = int(cu_real[-1])
        return dense_cut(kind, total, cp_size, cp_rank, cu_padded.device, real, None)
    return packed_cut(kind, cu_padded, cu_real, cp_size, cp_rank, total, True)


def _cut(kind: str, total: int, cp_size: int, cp_rank: int, padded: Tensor, real: Tensor) -> Cut:
    """Equal shares, from offsets that are known to cut."""
    if kind in STREAM:
        index = torch.stack(STREAM[kind](total, cp_size, device=padded.device))
    else:
        index = rows(padded.long(), total, cp_size, torch.arange(cp_size, device=padded.device)[:, None])
    # copies: the memo must not hold what it is keyed by
    cu_padded, cu_real = padded.to(torch.int32, copy=True), real.to(torch.int32, copy=True)
    return Cut(kind, cp_size, cp_rank, total, index, cu_padded, cu_real, (total // cp_size,) * cp_size)


def _multiple(kind: str, cp_size: int) -> int:
    """The multiple that a sequence must be; one rank alone holds all of it, of any length."""
    if cp_size == 1 or kind == "ragged":
        return 1
    return needs("dual_chunk_swap", cp_size) if kind == "packed" else needs(kind, cp_size)


def stripped(offsets: Tensor | Sequence[int]) -> Tensor:
    """The offsets on the host, without the negative fill on their right."""
    host = torch.as_tensor(offsets).cpu()
    if host.dim() != 1 or host.dtype == torch.bool or host.is_floating_point() or not len(host):
        return host  # refused with its own sentence
    kept = (host >= 0).nonzero().flatten()
    return host[: int(kept[-1]) + 1] if len(kept) else host


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
