"""Index arrays of the layouts: the global positions that each rank holds.

    contiguous        equal blocks in order
    striped           position i on rank i % world
    dual_chunk_swap   a chunk and its mirror image from the end: equal work on every rank under a causal mask
    ragged            blocks in order, of any lengths, including 0
    packed            many sequences in one stream (THD), each in dual_chunk_swap order

A function `<layout>` returns the positions of all ranks, and `packed_positions` the positions of one rank.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import index
from string import ascii_lowercase, digits

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from torch_impl.contract import Function, NonNegativeInt, PositiveInt, Rejected, contract, dtype_name, is_integer
from torch_impl.layouts.divisibility import check_divisible, first, offsets_of, validate_offsets

_REMEDY = "pass a tensor of positions for each rank"
ALPHABET = digits + ascii_lowercase


@contract("contiguous")
def contiguous(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds, in equal contiguous blocks.

    >>> contiguous(6, 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([4, 5])]

    Errors: ValueError unless size is a multiple of world; TypeError for non-integers.
    """
    check_divisible("contiguous", size, world)
    return list(torch.arange(size, device=device).view(world, size // world).unbind())


@contract("striped")
def striped(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds, dealt out round-robin.

    >>> striped(6, 3)
    [tensor([0, 3]), tensor([1, 4]), tensor([2, 5])]

    Errors: ValueError unless size is a multiple of world; TypeError for non-integers.
    Source: arXiv 2311.09431 (striped attention).
    """
    check_divisible("striped", size, world)
    rank = torch.arange(world, device=device)[:, None]
    return list((rank + world * torch.arange(size // world, device=device)).unbind())


@contract("dual_chunk_swap")
def dual_chunk_swap(size: int, world: int, *, device: torch.device | str | None = None) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds: a chunk and its mirror image from the end.

    >>> dual_chunk_swap(8, 2)
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]

    Errors: ValueError unless size is a multiple of 2 * world; TypeError for non-integers.
    """
    check_divisible("dual_chunk_swap", size, world)
    return list(_dual_chunk_swap(size, world, torch.arange(world, device=device)[:, None], device).unbind())


def _dual_chunk_swap(size: int, world: int, rank: int | Tensor, device: torch.device | str | None) -> Tensor:
    """index[r, i] = i + c * r in the first chunk, i + c * (2 * (world - 1) - r) in the second; chunks have length c."""
    chunk = size // (2 * world)
    i = torch.arange(2 * chunk, device=device)
    # The second chunk starts at c * (2 * world - 1 - r); i counts from c there, hence one chunk less.
    return i + chunk * torch.where(i < chunk, rank, 2 * (world - 1) - rank)


@contract("ragged")
def ragged(
    size: int, world: int, lengths: Sequence[int] | None = None, *, device: torch.device | str | None = None
) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds, in blocks of these `lengths`; by default DTensor's, ceil(size / world).

    >>> ragged(4, 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([], dtype=torch.int64)]

    Errors: ValueError unless there is one non-negative length for each rank and they add up to the size; TypeError for
            a size, world or lengths that are not integers.
    """
    check_divisible("ragged", size, world)
    bounds = _ragged_bounds(size, world, lengths)
    # tensor_split takes only the borders between shards, without the first start and the last end.
    return list(torch.arange(size, device=device).tensor_split(bounds[1:-1]))


def ceil_bound(size: int, world: int, rank: int) -> int:
    """The start of a rank's block by DTensor's rule: blocks of ceil(size / world) until the size is used up."""
    return min(rank * -(-size // world), size)


def _ragged_bounds(size: int, world: int, lengths: Sequence[int] | None) -> list[int]:
    """The start of each block and the end of the last: world + 1 offsets."""
    if lengths is None:
        return [ceil_bound(size, world, rank) for rank in range(world + 1)]
    lengths = _validate_lengths(lengths)
    bounds = list(accumulate(lengths, initial=0))
    rules = (
        (len(lengths) != world, f"have {len(lengths)} entries, world={world}; give one for each rank"),
        (any(length < 0 for length in lengths), "have a negative one; lengths are 0 or more"),
        (bounds[-1] != size, f"add up to {bounds[-1]}, size={size}; they must be equal"),
    )
    for is_broken, problem in rules:
        if is_broken:
            raise Rejected(f"lengths {lengths} {problem}")
    return bounds


def _validate_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of any integer type, as ints; bools and other types are rejected."""
    try:
        entries = tuple(lengths)
    except TypeError:
        raise Rejected(f"lengths={lengths!r} is not a sequence; give one int for each rank", TypeError) from None
    if not any(isinstance(length, bool) for length in entries):
        with suppress(TypeError):
            return tuple(map(index, entries))
    raise Rejected(f"lengths {entries} are not all integers; pass ints", TypeError)


@contract("packed")
def packed_positions(
    size: int,
    world: int,
    rank: int,
    cu_seqlens: Tensor | Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> Int64[Tensor, " local"]:
    """Global positions of one rank: its shard of sequence 0, then of sequence 1, ..."""
    check_divisible("packed", size, world, rank)
    offsets_of("cu_seqlens", cu_seqlens)
    return packed_rows(validate_offsets(cu_seqlens, size, world).to(_device_of(cu_seqlens, device)), size, world, rank)


@contract("packed")
def packed(
    size: int,
    world: int,
    cu_seqlens: Tensor | Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> list[Int64[Tensor, " _"]]:
    """Global positions that each rank holds in a packed stream; `cu_seqlens` are the padded offsets, from 0 to `size`.

    >>> packed(12, 2, [0, 4, 12])
    [tensor([ 0,  3,  4,  5, 10, 11]), tensor([1, 2, 6, 7, 8, 9])]

    Cost:   one copy of the offsets to the host; the arrays are on the device of `cu_seqlens`, or on `device`.
    Errors: ValueError if the offsets do not run from 0 up to size or a padded length is not a multiple of
            2 * world; TypeError if the offsets, size or world are not integers.
    """
    check_divisible("packed", size, world)
    offsets_of("cu_seqlens", cu_seqlens)
    # Validate on the host, then compute the arrays of all ranks at once on the device.
    offsets = validate_offsets(cu_seqlens, size, world).to(_device_of(cu_seqlens, device))
    return list(packed_rows(offsets, size, world, torch.arange(world, device=offsets.device)[:, None]).unbind())


def packed_rows(offsets: Int64[Tensor, " offsets"], size: int, world: int, rank: int | Tensor) -> Tensor:
    """Slot t of a rank holds position t + shift, with one shift for each of the two chunks of a sequence.

    `rank` is one rank, or [n, 1] for the rows of n ranks. One formula serves all sequences, without a loop.
    """
    # 1. The sequences in the rank's local stream: their starts, their lengths, and the lengths of their first chunks.
    starts = offsets // world
    lengths = starts.diff()
    half = lengths // 2
    # 2. The shift of each chunk from local slot to global position, as in `_dual_chunk_swap`, in order of the stream.
    before = offsets[:-1] - starts[:-1]
    first, second = before + half * rank, before + half * (2 * (world - 1) - rank)
    shift = torch.stack([first, second], -1).flatten(-2)
    # 3. The chunk of each slot. With a given output_size, repeat_interleave does not wait for the device.
    chunk_lengths, local = torch.stack([half, lengths - half], -1).flatten(), size // world
    chunk = torch.repeat_interleave(chunk_lengths, output_size=local)
    return shift.gather(-1, chunk.expand(*shift.shape[:-1], -1)).add_(torch.arange(local, device=offsets.device))


def _device_of(cu_seqlens: Tensor | Sequence[int], device: torch.device | str | None) -> torch.device | str | None:
    return cu_seqlens.device if device is None and isinstance(cu_seqlens, Tensor) else device


@contract
def inverse(positions: Iterable[Int[Tensor, " _"]]) -> Int64[Tensor, " _"]:
    """The index array that restores sequential order: `sequential = rank_major[inverse]`.

    `inverse[p]` is the row of position p in cat(rank 0, rank 1, ...).

    >>> inverse([torch.tensor([0, 3]), torch.tensor([1, 2])])
    tensor([0, 2, 3, 1])

    Cost:   one sort and one host read; neither if tensors have no values, as under tracing.
    Errors: ValueError unless the `positions` are 1-D and hold each of 0..n-1 once; TypeError unless they are one or
            more tensors of integers.
    """
    rank_major = torch.cat(_validate_shards(positions)).long()
    _check_permutation(rank_major)
    return inverse_permutation(rank_major)


def inverse_permutation(rank_major: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The inverse of a permutation; the input is not checked. Does not wait for the device."""
    rows = torch.arange(len(rank_major), device=rank_major.device)
    return torch.empty_like(rank_major).scatter_(0, rank_major, rows)


def _check_permutation(rank_major: Int64[Tensor, " n"]) -> None:
    """Reject anything but a permutation; accept traced, vmapped, fake and meta tensors, which have no values."""
    if torch.compiler.is_compiling():
        return
    ordered = rank_major.sort().values
    try:
        wrong = first(ordered != torch.arange(len(ordered), device=ordered.device))
    except RuntimeError:  # a tensor without values
        return
    # At the first difference k, the sorted entry is larger (k is missing) or smaller (repeated or negative).
    for k in wrong:
        entry = int(ordered[k])
        reason = f"{k} is missing" if entry > k else f"{entry} is {'negative' if entry < 0 else 'there twice'}"
        problem = f"positions are not a permutation of 0..{len(ordered) - 1}: {reason}"
        raise Rejected(f"{problem}; give each position once")


def _validate_shards(positions: Iterable[Tensor]) -> list[Tensor]:
    """The positions as a list, validated: one row of integers for each rank."""
    if not isinstance(positions, Iterable):
        raise Rejected(f"positions={positions!r} is not a sequence; {_REMEDY}", TypeError)
    shards = list(positions)
    if not shards:
        raise Rejected(f"positions=[] holds no tensor; {_REMEDY}", TypeError)
    for r, shard in enumerate(shards):
        label = f"positions[{r}] is"
        if not isinstance(shard, Tensor):
            raise Rejected(f"{label} a {type(shard).__name__}; {_REMEDY}", TypeError)
        if not is_integer(shard):
            raise Rejected(f"{label} {dtype_name(shard)}; positions are integers", TypeError)
        if shard.ndim != 1:
            raise Rejected(f"{label} {list(shard.shape)}; positions are one row for each rank")
    return shards


@contract
def draw(layout: Function, size: NonNegativeInt, world: PositiveInt) -> str:
    """Draw `layout` as text, one character per position: its rank in base 36, `?` from rank 36 on.

    >>> draw(dual_chunk_swap, 16, 4)
    '0011223333221100'

    Errors: ValueError if a position is held by no rank or by two, for a negative size or a world below 1; TypeError for
            a layout that is not a function, and for sizes that are not integers.
    """
    shards = layout(size, world)
    positions = torch.cat(list(shards)).cpu()
    if not torch.equal(positions.sort().values, torch.arange(size)):
        name = getattr(layout, "__name__", "given")
        raise ValueError(f"layout {name!r} is not a partition of {size} positions over {world} ranks")
    # The rank of each entry of cat(rank 0, ...), sorted by position.
    ranks = torch.arange(world).repeat_interleave(torch.tensor([len(shard) for shard in shards]))
    owner = ranks[positions.argsort()]
    return "".join(ALPHABET[rank] if rank < len(ALPHABET) else "?" for rank in owner.tolist())
