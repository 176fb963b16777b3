"""The token layout of a batch: the positions on every rank, the sequences, and their padding.

`index[r]` are the global positions that cp rank r holds, in local order. Sequence j occupies
`cu_padded[j]:cu_padded[j + 1]` of the global stream, and its first `cu_real[j + 1] - cu_real[j]` tokens are real.
A dense row is one sequence.

Build a TokenLayout once per batch, from lengths or offsets. They are validated on the host; the arrays are computed on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Int, Int32, Int64
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

from torch_impl.collectives import all_gather, large_tensors
from torch_impl.collectives.lengths import dim_from_front
from torch_impl.contract import GradientType, Group, OneOf, Rejected, ShardedAny, contract
from torch_impl.layouts.cache import Value, cached, cached_tensor, for_training, has_numbers
from torch_impl.layouts.divisibility import (
    check_row,
    first,
    host_offsets,
    length_multiple,
    length_problem,
    offsets_of,
    rank_problem,
    sharding_problem,
    too_short,
    validate_offsets,
    without_fill,
)
from torch_impl.layouts.index_arrays import ALPHABET, contiguous, inverse_permutation, packed_rows, ragged, striped
from torch_impl.layouts.prefixes import lengths_before, validate_prefixes

DenseKind = Annotated[str, OneOf(("contiguous", "dual_chunk_swap", "ragged", "striped"))]
PackedKind = Annotated[str, OneOf(("contiguous", "packed", "striped"))]


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The positions that each of `cp_size` ranks holds, and the sequences they belong to; `cp_rank` is this rank.

    `total` is the number of global tokens, padding included, and `counts[r]` the number on rank r. Shorter rows of
    `index` (ragged only) end in -1. All tensors are on one device; derived values are computed on first use and cached.
    `prefix_of[j]` is the sequence that sequence j continues, or -1; it is empty if no sequence continues another.

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
    prefix_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Not a field, since FSDP's mixed precision copies dataclasses among a module's arguments.
        cache: dict[Hashable, Any] = {}
        object.__setattr__(self, "_cache", cache)

    @staticmethod
    @contract("TokenLayout.dense")
    @for_training
    def dense(
        kind: DenseKind,
        length: int,
        *,
        cp_size: int,
        cp_rank: int,
        device: torch.device | str | None = None,
        real_length: int | None = None,
        counts: Sequence[int] | None = None,
    ) -> TokenLayout:
        """The layout of one sequence of `length` tokens. The first `real_length` tokens are real (default: all).

        `kind` is contiguous, ragged, dual_chunk_swap or striped. `counts` is the number of tokens on each rank, for
        ragged only (default: DTensor's ceil rule). With `cp_size` 1 any length is valid. Arrays are on `device`, and
        `cp_rank` is the calling rank.

        >>> TokenLayout.dense("dual_chunk_swap", 8, cp_size=2, cp_rank=0).local_index
        tensor([0, 1, 6, 7])

        Errors: ValueError for an unknown kind, a rank outside cp, a length that cannot be sharded, or counts that do
                not add up; TypeError for a length, count, size or rank that is not an integer.
        """
        return build_dense(kind, length, cp_size, cp_rank, device, real_length, counts)

    @staticmethod
    @contract("TokenLayout.packed")
    @for_training
    def packed(
        cu_padded: Tensor | Sequence[int],
        cu_real: Tensor | Sequence[int] | None = None,
        *,
        cp_size: int,
        cp_rank: int,
        kind: PackedKind = "packed",
        total: int | None = None,
        validate: bool = True,
        prefix_of: Sequence[int] | Tensor | None = None,
    ) -> TokenLayout:
        """The layout of packed sequences: `cu_padded` are their padded offsets, `cu_real` cumulative real lengths.

        `kind` packed shards each sequence by DualChunkSwap; contiguous and striped shard the stream as a whole.
        Negative entries at the end of the offsets are ignored. The arrays are on the offsets' device.

        `prefix_of[j]` is an earlier sequence that sequence j continues, or -1, for example the shared prompt of several
        responses. Sequence j also attends to the real tokens of its prefix, of the prefix's prefix, and so on, and its
        positions continue after them.

        >>> TokenLayout.packed([0, 4, 6, 12], [0, 3, 5, 11], cp_size=1, cp_rank=0).padding_mask.nonzero().flatten()
        tensor([3])

        Cost:   one copy of the offsets to the host, or none for tensors with `total` and `validate=False`. Values on a
                device are then not checked: a `total` that differs from the last offset is accepted and gives a
                meaningless layout, if it can be sharded. Each call builds a new layout: build one per batch.
        Errors: ValueError for an unknown kind, a rank outside cp, offsets that do not rise from 0 to total, a real
                length above its padded length, a padded length that cannot be sharded, `cu_real` with more or fewer
                sequences, or a prefix that is not an earlier sequence; TypeError for offsets, prefixes, a size or a
                rank that are not integers.
        """
        layout = build_packed(kind, cu_padded, cu_real, cp_size, cp_rank, total, validate)
        if prefix_of is None:
            return layout
        return replace(layout, prefix_of=validate_prefixes(prefix_of, len(layout.cu_padded) - 1))

    def cached(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """The cached value of `build()` for this key, such as a block schedule or a copy on another device.

        The first call builds it and stores it with this layout.
        """
        # Fake tensors are neither stored in the cache nor taken from it.
        if not has_numbers():
            return build()
        cache: dict[Hashable, Any] = self.__dict__["_cache"]
        if key not in cache:
            # Dynamo cannot trace a change of inference mode, and traced code does not need one.
            cache[key] = build() if torch.compiler.is_compiling() else for_training(build)()
        return cache[key]

    @cached_tensor
    def local_index(self) -> Int64[Tensor, " local"]:
        """Global positions that this rank holds, in local order, without the -1 at the end of a ragged row."""
        return self.index[self.cp_rank, : self.counts[self.cp_rank]]

    @cached_tensor
    def inverse(self) -> Int64[Tensor, " total"]:
        """Row of each position in cat(rank 0, rank 1, ...): `sequential = rank_major[inverse]`."""
        # A ragged index may end in -1 and cannot be inverted, but ragged is the identity anyway.
        return inverse_permutation(self._all_positions if self.is_identity else self.index.flatten())

    @cached_tensor
    def sequence_ids(self) -> Int64[Tensor, " total"]:
        """The sequence that each global position belongs to."""
        # right=True skips every offset at or before the position, so that no position belongs to an empty sequence.
        return torch.searchsorted(self.cu_padded[1:].long(), self._all_positions, right=True)

    @cached_tensor
    def lengths_before(self) -> Int64[Tensor, " sequences"]:
        """The number of real tokens in all prefixes of each sequence; 0 without `prefix_of`."""
        return lengths_before(self.prefix_of, self.cu_real.diff().long())

    @cached_tensor
    def position_ids(self) -> Int64[Tensor, " total"]:
        """Position of each token within its sequence, padding included; the tokens of its prefixes come first."""
        return self._places + self.lengths_before[self.sequence_ids] if self.prefix_of else self._places

    @cached_tensor
    def padding_mask(self) -> Bool[Tensor, " total"]:
        """True at global positions that are padding."""
        return self._places >= self.cu_real.diff()[self.sequence_ids]

    @cached_tensor
    def local_cu(self) -> Int32[Tensor, " offsets"]:
        """Offsets of the sequences in this rank's local stream, padding included."""
        # A rank holds sequences in order, so their ids are sorted, and sequence j starts where the ids reach j.
        local_ids = self.sequence_ids[self.local_index]
        sequences = torch.arange(len(self.cu_padded), device=local_ids.device)
        return torch.searchsorted(local_ids, sequences, out_int32=True)

    @property
    def is_identity(self) -> bool:
        """Whether cat(rank 0, rank 1, ...) is the global stream."""
        return self.cp_size == 1 or self.kind in ("contiguous", "ragged")

    @cached_tensor
    def original_length(self) -> int:
        """Number of global positions up to the last real token. Reads the offsets once."""
        ends = self.cu_padded[:-1] + self.cu_real.diff()
        # A sequence without real tokens has no last real token: it counts as 0.
        return max(torch.where(self.cu_real.diff() > 0, ends, 0).tolist(), default=0)

    @cached_tensor
    def _places(self) -> Int64[Tensor, " total"]:
        """Place of each token within its sequence."""
        return self._all_positions - self.cu_padded.long()[self.sequence_ids]

    @cached_tensor
    def _all_positions(self) -> Int64[Tensor, " total"]:
        return torch.arange(self.total, device=self.index.device)

    @contract("TokenLayout.shard")
    def shard(self, x: ShardedAny[Tensor, "... t ... cp=R"], dim: int) -> ShardedAny[Tensor, "... t/cp:LAYOUT ..."]:
        """This rank's shard of the full tensor `x` along `dim`.

        Any dtype, which the shard keeps; differentiable.

        Cost:   no collective; one copy of the shard.
        Errors: ValueError if x lacks the dim or does not have `total` rows along it.
        """
        dim = dim_from_front("dim", dim, x)
        self._check_rows(x, dim, self.total, "global")
        return large_tensors.index_select(x, self.local_index, dim)

    @contract("TokenLayout.unshard")
    def unshard(
        self,
        x: ShardedAny[Tensor, "... t/cp:LAYOUT ..."],
        dim: int,
        group: Group[ProcessGroup, "axis"],
        *,
        trim: bool = False,
        gradient: GradientType = "R",
    ) -> ShardedAny[Tensor, "... t ... cp=R"] | ShardedAny[Tensor, "... t ... cp=I"]:
        """Gather the shards `x` over `group` in global order along `dim`; `trim` drops the padding at the end.

        With `gradient` R the ranks' cotangents are summed over cp, and each rank gets its rows of the sum. With I the
        cotangents are equal on all ranks, and each rank takes its rows without a collective.

        Cost:   forward 1 all_gather of the longest shard; backward 1 reduce_scatter (R, summed in float32 or
                wider) or none (I). Saves the index.
        Errors: TypeError if group is not a ProcessGroup; ValueError for an unknown gradient type, a group with another
                size or rank than the layout, or an x with another number of rows than this rank's shard.
        """
        if (group.size(), group.rank()) != (self.cp_size, self.cp_rank):
            of_layout = f"the layout is for cp={self.cp_size} and rank {self.cp_rank}"
            raise Rejected(f"group has cp={group.size()} and rank {group.rank()}, {of_layout}; rebind it")
        dim = dim_from_front("dim", dim, x)
        self._check_rows(x, dim, self.counts[self.cp_rank], "local")
        # The gather returns rank-major order; the inverse index restores global order.
        rank_major = all_gather(x, group, out=gradient, dim=dim, lengths=self.counts)
        full = large_tensors.index_select(rank_major, self.inverse, dim)
        return full.narrow(dim, 0, self.original_length) if trim else full

    def draw(self) -> str:
        """Draw the rank that holds each position, in base 36 (`?` from rank 36 on), with `|` between sequences."""
        ranks = torch.arange(self.cp_size).repeat_interleave(torch.tensor(self.counts), output_size=self.total)
        owners = ranks[self.inverse.cpu()].tolist()
        text = "".join(ALPHABET[rank] if rank < len(ALPHABET) else "?" for rank in owners)
        cu = self.cu_padded.tolist()
        return "|".join(text[start:stop] for start, stop in pairwise(cu))

    @for_training
    def on(self, device: torch.device | str) -> TokenLayout:
        """The same layout with its tensors on another `device`."""
        index, padded, real = self.index.to(device), self.cu_padded.to(device), self.cu_real.to(device)
        return replace(self, index=index, cu_padded=padded, cu_real=real)

    @contract("TokenLayout.rebind")
    @for_training
    def rebind(self, cp_size: int, cp_rank: int) -> TokenLayout:
        """The same tokens sharded over another group, for rank `cp_rank`; ragged counts follow DTensor's ceil rule.

        Errors: ValueError for a rank outside cp, or a length that cannot be sharded over `cp_size`.
        """
        layout = rebuild(self.kind, self.total, cp_size, cp_rank, self.cu_padded, self.cu_real)
        return replace(layout, prefix_of=self.prefix_of)

    def _check_rows(self, x: Tensor, dim: int, rows: int, where: str) -> None:
        if x.shape[dim] != rows:
            difference = f"x has {x.shape[dim]} rows along dim {dim}, but the layout has {rows} {where} rows"
            raise Rejected(f"{difference}; pass a tensor of this layout")


@cached(16)
def dense_layout(kind: str, length: int, cp_size: int, cp_rank: int, device: torch.device) -> TokenLayout:
    """One cached layout for all calls with the same shape, which also share its derived values."""
    return TokenLayout.dense(kind, length, cp_size=cp_size, cp_rank=cp_rank, device=device)


def stream_layout(
    kind: PackedKind, cu_seqlens: Int[Tensor, " offsets"], total: int, cp_size: int, cp_rank: int
) -> TokenLayout:
    """One cached layout for all calls with equal offsets, for example the calls of all layers for one batch."""
    if torch.compiler.is_compiling() or not has_numbers():
        return TokenLayout.packed(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, kind=kind, total=total)
    return _stream_layout(kind, tuple(cu_seqlens.tolist()), total, cp_size, cp_rank, cu_seqlens.device)


@cached(4)  # enough for a training batch, a validation batch, and a recomputation between them
def _stream_layout(
    kind: PackedKind, offsets: tuple[int, ...], total: int, cp_size: int, cp_rank: int, device: torch.device
) -> TokenLayout:
    cu_seqlens = torch.tensor(offsets, device=device)
    return TokenLayout.packed(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, kind=kind, total=total)


STREAM = {"contiguous": contiguous, "striped": striped}  # sharded as one stream, across the ends of sequences


def build_dense(
    kind: str,
    length: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str | None,
    real_length: int | None,
    counts: Sequence[int] | None,
) -> TokenLayout:
    """The core of `TokenLayout.dense`."""
    # 1. Validate, on the host.
    real = length if real_length is None else real_length
    if problem := rank_problem(cp_size, cp_rank) or length_problem(kind, length, cp_size, real, counts):
        raise ValueError(problem)
    # 2. Both rows of offsets in one tensor, so that a device needs one copy.
    cu = torch.tensor([[0, length], [0, real]], device=device)
    if kind != "ragged":
        return _build(kind, length, cp_size, cp_rank, cu[0], cu[1])
    # 3. Ragged shards differ in length: fill the rows of the index with -1.
    shards = ragged(length, cp_size, counts, device=device)
    index = pad_sequence(shards, batch_first=True, padding_value=-1)
    rank_counts = tuple(len(shard) for shard in shards)
    return TokenLayout(kind, cp_size, cp_rank, length, index, cu[0].int(), cu[1].int(), rank_counts)


def build_packed(
    kind: str,
    cu_padded: Tensor | Sequence[int],
    cu_real: Tensor | Sequence[int] | None,
    cp_size: int,
    cp_rank: int,
    total: int | None,
    validate: bool,
) -> TokenLayout:
    """The core of `TokenLayout.packed`."""
    # 1. Checks that do not need the values of the offsets.
    if problem := rank_problem(cp_size, cp_rank):
        raise ValueError(problem)
    offsets_of("cu_padded", cu_padded)
    if cu_real is not None:
        offsets_of("cu_real", cu_real)
    # 2. Without validation, tensors need no copy to the host; a list is on the host anyway and is always validated.
    if not validate and total is not None and isinstance(cu_padded, Tensor):
        check_row("cu_seqlens", cu_padded)
        _check_total(kind, cu_padded, total, cp_size)
        padded = real = _replace_fill(cu_padded, total)
        if cu_real is not None:
            real_offsets = torch.as_tensor(cu_real)
            check_row("cu_real", real_offsets)
            real = _replace_fill(real_offsets, None)
        if real.shape != padded.shape:
            raise ValueError(f"cu_real has {len(real)} offsets and cu_padded has {len(padded)}; give equally many")
        return _build(kind, total, cp_size, cp_rank, padded, real.to(padded.device))
    # 3. Otherwise validate everything on the host. With packed, each sequence must be divisible; else the stream.
    multiple = length_multiple(kind, cp_size) if kind == "packed" else 1
    padded = validate_offsets(without_fill(cu_padded), total, cp_size, axis="cp", multiple=multiple)
    size = int(padded[-1])
    if reason := sharding_problem("t", size, "cp", cp_size, kind):
        raise ValueError(reason)
    real = padded if cu_real is None else _validate_real(without_fill(cu_real), padded)
    device = cu_padded.device if isinstance(cu_padded, Tensor) else None
    return _build(kind, size, cp_size, cp_rank, padded.to(device), real.to(device))


def rebuild(kind: str, total: int, cp_size: int, cp_rank: int, cu_padded: Tensor, cu_real: Tensor) -> TokenLayout:
    """The core of `TokenLayout.rebind`."""
    if kind in ("ragged", "dual_chunk_swap"):
        real = int(cu_real[-1])
        return build_dense(kind, total, cp_size, cp_rank, cu_padded.device, real, None)
    return build_packed(kind, cu_padded, cu_real, cp_size, cp_rank, total, True)


def _build(kind: str, total: int, cp_size: int, cp_rank: int, padded: Tensor, real: Tensor) -> TokenLayout:
    """A layout of equal shards, from validated offsets."""
    if kind in STREAM:
        index = torch.stack(STREAM[kind](total, cp_size, device=padded.device))
    else:
        index = packed_rows(padded.long(), total, cp_size, torch.arange(cp_size, device=padded.device)[:, None])
    # Copy the offsets, so that a caller who writes into them does not change the layout.
    cu_padded, cu_real = padded.to(torch.int32, copy=True), real.to(torch.int32, copy=True)
    return TokenLayout(kind, cp_size, cp_rank, total, index, cu_padded, cu_real, (total // cp_size,) * cp_size)


def _check_total(kind: str, offsets: Tensor, total: int, cp_size: int) -> None:
    """Validate a total without a copy to the host: it must be shardable, and offsets on the host must end there."""
    multiple = length_multiple(kind, cp_size)
    if total < 0 or total % multiple:
        what = f"total={total} cannot be sharded by {kind} over cp={cp_size} (needs a multiple of {multiple})"
        raise ValueError(f"{what}; pass where the padded offsets end")
    # Test the exact type: a fake tensor reports the CPU and has no values.
    is_on_host = type(offsets) is Tensor and offsets.device.type == "cpu"
    if is_on_host and (end := int(offsets.max())) != total:
        raise ValueError(too_short(end, total))


def _replace_fill(offsets: Tensor, end: int | None) -> Tensor:
    """Replace negative entries at the end by empty sequences, without reading values on the host."""
    last = offsets.max() if end is None else end
    return torch.where(offsets < 0, last, offsets)


def _validate_real(cu_real: Tensor, padded: Tensor) -> Tensor:
    """Cumulative real lengths on the host; ValueError unless each real length matches a padded one and fits into it."""
    real = host_offsets(cu_real, "cu_real")
    if len(real) != len(padded):
        sequences = f"{len(real) - 1} sequences, the padded offsets have {len(padded) - 1}"
        raise ValueError(f"cu_real: {sequences}; give one length for each")
    for j in first(real.diff() > padded.diff()):
        length, slot = int(real.diff()[j]), int(padded.diff()[j])
        raise ValueError(f"cu_real: sequence {j}: real length {length} exceeds its padded length {slot}")
    return real
