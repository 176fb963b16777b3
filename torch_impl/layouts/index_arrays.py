"""Where the positions of a sequence live: for each layout, the positions of every rank as index arrays.

    contiguous        equal blocks in order
    striped           positions dealt out in turn
    dual_chunk_swap   an early chunk and its mirror image from the end, which cost the same on every rank under a
                      causal mask
    ragged            blocks in order, of any lengths, empty ones included
    packed            many sequences in one stream (THD), DualChunkSwap inside each, by one formula for the stream

A function `<layout>` gives the positions of all ranks, `<layout>_positions` those of one rank.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index
from string import ascii_lowercase, digits

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from torch_impl.layouts.divisibility import check_cut, checked_offsets, first, offsets_of

_REMEDY = "pass a tensor of positions for each rank"
ALPHABET = digits + ascii_lowercase


def contiguous_positions(
    size: int, world: int, rank: int, *, device: torch.device | str | None = None
) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: index[r, i] = r * (size / world) + i."""
    check_cut("contiguous", size, world, rank)
    local = size // world
    return torch.arange(rank * local, (rank + 1) * local, device=device)


def contiguous(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds.

    >>> contiguous(6, 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([4, 5])]

    Errors: ValueError unless size is a multiple of world; TypeError for what is no integer.
    """
    check_cut("contiguous", size, world)
    return list(torch.arange(size, device=device).view(world, size // world).unbind())


def striped_positions(
    size: int, world: int, rank: int, *, device: torch.device | str | None = None
) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: index[r, i] = i * world + r."""
    check_cut("striped", size, world, rank)
    return torch.arange(rank, size, world, device=device) if size else torch.arange(0, device=device)


def striped(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds.

    >>> striped(6, 3)
    [tensor([0, 3]), tensor([1, 4]), tensor([2, 5])]

    Errors: ValueError unless size is a multiple of world; TypeError for what is no integer.
    Source: arXiv 2311.09431 (striped attention).
    """
    check_cut("striped", size, world)
    rank = torch.arange(world, device=device)[:, None]
    return list((rank + world * torch.arange(size // world, device=device)).unbind())


def dual_chunk_swap_positions(
    size: int, world: int, rank: int, *, device: torch.device | str | None = None
) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: chunk `rank`, then chunk `2 * world - 1 - rank`, of 2 * world."""
    check_cut("dual_chunk_swap", size, world, rank)
    return _dual_chunk_swap(size, world, rank, device)


def dual_chunk_swap(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds.

    >>> dual_chunk_swap(8, 2)
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]

    Errors: ValueError unless size is a multiple of 2 * world; TypeError for what is no integer.
    """
    check_cut("dual_chunk_swap", size, world)
    return list(_dual_chunk_swap(size, world, torch.arange(world, device=device)[:, None], device).unbind())


def _dual_chunk_swap(size: int, world: int, rank: int | Tensor, device: torch.device | str | None) -> Tensor:
    """index[r, i] = i + c * r in the first chunk, i + c * (2 * (world - 1) - r) in the second; c a chunk."""
    chunk = size // (2 * world)
    i = torch.arange(2 * chunk, device=device)
    return i + chunk * torch.where(i < chunk, rank, 2 * (world - 1) - rank)


def ragged_positions(
    size: int,
    world: int,
    rank: int,
    lengths: Sequence[int] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Int64[Tensor, " local"]:
    """Global positions that one rank holds: from the sum of the lengths before it to the sum with its own."""
    check_cut("ragged", size, world, rank)
    bounds = _ragged_bounds(size, world, lengths)
    return torch.arange(bounds[rank], bounds[rank + 1], device=device)


def ragged(
    size: int, world: int, lengths: Sequence[int] | None = None, *, device: torch.device | str | None = None
) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds; without lengths, ceil(size / world) while it lasts, as DTensor.

    >>> ragged(4, 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([], dtype=torch.int64)]

    Errors: ValueError if the lengths are not one for each rank, one is negative, or they miss the size; TypeError for
            a size, world or lengths that are no integers.
    """
    check_cut("ragged", size, world)
    bounds = _ragged_bounds(size, world, lengths)
    return list(torch.arange(size, device=device).tensor_split(bounds[1:-1]))


def ceil_bound(size: int, world: int, rank: int) -> int:
    """Where a rank's block starts by DTensor's rule: blocks of ceil(size / world) while they last."""
    return min(rank * -(-size // world), size)


def _ragged_bounds(size: int, world: int, lengths: Sequence[int] | None) -> list[int]:
    """Where each block starts, and the end: world + 1 offsets."""
    if lengths is None:
        return [ceil_bound(size, world, rank) for rank in range(world + 1)]
    lengths = _checked_lengths(lengths)
    if len(lengths) != world:
        raise ValueError(f"ragged: lengths {lengths} are {len(lengths)}, world={world}; give one for each rank")
    if min(lengths) < 0:
        raise ValueError(f"ragged: lengths {lengths} have a negative one; lengths are 0 or more")
    bounds = list(accumulate(lengths, initial=0))
    if bounds[-1] != size:
        raise ValueError(f"ragged: lengths {lengths} add up to {bounds[-1]}, size={size}; they must be equal")
    return bounds


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of any kind of integer, as ints; True and False are none."""
    try:
        given = tuple(lengths)
    except TypeError:
        raise TypeError(f"ragged: lengths={lengths!r} is no sequence; give one int for each rank") from None
    if not any(isinstance(length, bool) for length in given):
        with suppress(TypeError):
            return tuple(map(index, given))
    raise TypeError(f"ragged: lengths {given} are not all integers; pass ints")


def packed_positions(
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
    return packed_rows(checked_offsets(cu_seqlens, size, world).to(_device_of(cu_seqlens, device)), size, world, rank)


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
    offsets = checked_offsets(cu_seqlens, size, world).to(_device_of(cu_seqlens, device))
    return list(packed_rows(offsets, size, world, torch.arange(world, device=offsets.device)[:, None]).unbind())


def packed_rows(offsets: Int64[Tensor, " offsets"], size: int, world: int, rank: int | Tensor) -> Tensor:
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


def _device_of(cu_seqlens: Tensor | Sequence[int], device: torch.device | str | None) -> torch.device | str | None:
    return cu_seqlens.device if device is None and isinstance(cu_seqlens, Tensor) else device


def inverse(positions: Iterable[Int[Tensor, " _"]]) -> Int64[Tensor, " _"]:
    """`inverse[p]` is the row of position p in cat(rank 0, rank 1, ...): `sequential = rank_major[inverse]`.

    >>> inverse([torch.tensor([0, 3]), torch.tensor([1, 2])])
    tensor([0, 2, 3, 1])

    Cost:   one sort, and one read of it by the host; neither where a tensor has no numbers, as while it is traced.
    Errors: ValueError unless the pieces are rows that hold each of 0..n-1 once; TypeError for what are no tensors of
            integers, or none at all.
    """
    rank_major = torch.cat(_checked_pieces(positions)).long()
    _check_permutation(rank_major)
    return inverted(rank_major)


def inverted(rank_major: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The way back from what is known to be a permutation. Nothing is checked, and nothing waits for the device."""
    rows = torch.arange(len(rank_major), device=rank_major.device)
    return torch.empty_like(rank_major).scatter_(0, rank_major, rows)


def _check_permutation(rank_major: Int64[Tensor, " n"]) -> None:
    """Where it holds numbers: a traced, a vmapped, a fake or a meta tensor has none to look at."""
    if torch.compiler.is_compiling():
        return
    ordered = rank_major.sort().values
    try:
        wrong = first(ordered != torch.arange(len(ordered), device=ordered.device))
    except RuntimeError:
        return
    for k in wrong:
        held = int(ordered[k])
        why = f"{k} is missing" if held > k else f"{held} is {'negative' if held < 0 else 'there twice'}"
        raise ValueError(
            f"layouts.inverse: positions are not a permutation of 0..{len(ordered) - 1}: {why}; give each position once"
        )


def _checked_pieces(positions: Iterable[Tensor]) -> list[Tensor]:
    """One row of integers for each rank."""
    if not isinstance(positions, Iterable):
        raise TypeError(f"layouts.inverse: positions={positions!r} is no sequence; {_REMEDY}")
    pieces = list(positions)
    if not pieces:
        raise TypeError(f"layouts.inverse: positions=[] holds no tensor; {_REMEDY}")
    for r, piece in enumerate(pieces):
        if not isinstance(piece, Tensor):
            raise TypeError(f"layouts.inverse: positions[{r}] is a {type(piece).__name__}; {_REMEDY}")
        if piece.is_floating_point() or piece.is_complex() or piece.dtype == torch.bool:
            kind = str(piece.dtype).removeprefix("torch.")
            raise TypeError(f"layouts.inverse: positions[{r}] is {kind}; positions are integers")
        if piece.ndim != 1:
            raise ValueError(
                f"layouts.inverse: positions[{r}] is {list(piece.shape)}; positions are one row for each rank"
            )
    return pieces


def draw(layout: Callable[[int, int], Sequence[Tensor]], size: int, world: int) -> str:
    """`layout` as text, one character for each position: its rank in base 36, `?` from rank 36.

    >>> draw(dual_chunk_swap, 16, 4)
    '0011223333221100'

    Errors: ValueError if a position is held by no rank or by two.
    """
    pieces = layout(size, world)
    held = torch.cat(list(pieces)).cpu()
    if not torch.equal(held.sort().values, torch.arange(size)):
        name = getattr(layout, "__name__", "given")
        raise ValueError(f"layout {name!r} is not a partition of {size} positions over {world} ranks")
    ranks = torch.arange(world).repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
    owner = ranks[held.argsort()]
    return "".join(ALPHABET[rank] if rank < len(ALPHABET) else "?" for rank in owner.tolist())
