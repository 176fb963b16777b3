"""Packed (THD): many sequences in one stream, DualChunkSwap inside each, as index arrays.

One formula for the whole stream, so a thousand sequences cost what one does.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from torch_impl.layouts.needs import check_cut, needs


def positions(
    size: int,
    world: int,
    rank: int,
    cu_seqlens: Tensor | Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: its share of sequence 0, then of sequence 1, ..."""
    check_cut("packed", size, world, rank)
    offsets_of("packed: cu_seqlens", cu_seqlens)
    return rows(checked_offsets(cu_seqlens, size, world).to(_home(cu_seqlens, device)), size, world, rank)


def packed(
    size: int,
    world: int,
    cu_seqlens: Tensor | Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds; `cu_seqlens` are the padded offsets, from 0 to `size`.

    >>> packed(12, 2, [0, 4, 12])
    [tensor([ 0,  3,  4,  5, 10, 11]), tensor([1, 2, 6, 7, 8, 9])]

    Cost:   one copy of the offsets to the host; the arrays stand where `cu_seqlens` does, or on `device`.
    Errors: ValueError if the offsets do not run from 0 up to size or a padded length is no multiple of
            2 * world; TypeError if they, size or world are no integers.
    """
    check_cut("packed", size, world)
    offsets_of("packed: cu_seqlens", cu_seqlens)
    offsets = checked_offsets(cu_seqlens, size, world).to(_home(cu_seqlens, device))
    return list(rows(offsets, size, world, torch.arange(world, device=offsets.device)[:, None]).unbind())


def rows(offsets: Int64[Tensor, " offsets"], size: int, world: int, rank: int | Tensor) -> Tensor:
    """Slot t of a rank holds position t + shift, with one shift for the early chunk of a sequence, one for the late."""
    starts = offsets // world  # of the sequences in a rank's own stream
    lengths = starts.diff()
    half = lengths // 2
    before = offsets[:-1] - starts[:-1]
    early, late = before + half * rank, before + half * (2 * (world - 1) - rank)
    shift = torch.stack([early, late], -1).flatten(-2)
    each, local = torch.stack([half, lengths - half], -1).flatten(), size // world
    chunk = torch.repeat_interleave(each, output_size=local)
    return shift.gather(-1, chunk.expand(*shift.shape[:-1], -1)).add_(torch.arange(local, device=offsets.device))


def _home(cu_seqlens: Tensor | Sequence[int], device: torch.device | str | None) -> torch.device | str | None:
    return cu_seqlens.device if device is None and isinstance(cu_seqlens, Tensor) else device


def checked_offsets(
    cu_seqlens: Tensor | Sequence[int],
    size: int | None,
    world: int,
    *,
    axis: str = "world",
    multiple: int | None = None,
) -> Int64[Tensor, " offsets"]:
    """The offsets on the host as int64, from 0 up to `size` (wherever they end, if None), or why they cut nothing.

    Each length must be a multiple of `multiple`, which is DualChunkSwap's over `axis` if not said.
    """
    offsets = host_offsets(cu_seqlens, "cu_seqlens")
    if size is not None and offsets[-1] != size:
        short = f"ends at {offsets[-1]} but the stream holds {size} tokens"
        raise ValueError(f"cu_seqlens {short}; pass the padded offsets")
    lengths = offsets.diff()
    multiple = needs("dual_chunk_swap", world) if multiple is None else multiple
    for j in first(lengths % multiple != 0):
        rule = f"dual_chunk_swap over {axis}={world} needs a multiple of {multiple}"
        padded = lengths[j] + -lengths[j] % multiple
        raise ValueError(f"cu_seqlens: sequence {j} has padded length {lengths[j]}, {rule}; pad it to {padded}")
    return offsets


def host_offsets(given: Tensor | Sequence[int], name: str) -> Int64[Tensor, " offsets"]:
    """Integers in one row that start at 0 and never decrease, on the host."""
    given = offsets_of(name, given)
    check_row(name, given)
    offsets = given.cpu().long()
    check_rising(name, offsets)
    return offsets


def offsets_of(name: str, given: Tensor | Sequence[int]) -> Tensor:
    """A tensor of integers, where it stands; TypeError for what is none. Nothing waits for the device."""
    try:
        offsets = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={given!r} are no offsets; pass a row of integers") from None
    if offsets.numel():
        _check_integers(name, offsets)
    return offsets


def check_row(name: str, given: Tensor) -> None:
    """What is known of offsets without their values: one row of integers."""
    if given.dim() != 1 or not len(given):
        raise ValueError(f"{name}: shape is {tuple(given.shape)}; offsets are one row of at least [0]")
    _check_integers(name, given)


def _check_integers(name: str, given: Tensor) -> None:
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"{name}: dtype is {str(given.dtype).removeprefix('torch.')}; offsets are integers")


def check_rising(name: str, offsets: Int64[Tensor, " offsets"]) -> None:
    """ValueError unless offsets on the host start at 0 and never decrease."""
    if offsets[0] != 0:
        raise ValueError(f"{name}: starts at {offsets[0]}; offsets start at 0")
    for j in first(offsets.diff() < 0):
        back = f"from {offsets[j]} back to {offsets[j + 1]}"
        raise ValueError(f"{name}: sequence {j} runs {back}; offsets never decrease")


def first(wrong: Tensor) -> list[int]:
    """The first entry that is wrong, if any."""
    return wrong.nonzero()[:1].flatten().tolist()
