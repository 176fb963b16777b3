"""Reorder full (unsharded) streams: permute the chunks of each sequence, or convert between rank- and sequence-major.

Each function is one gather of rows by an index array, and its backward is the gather by the inverse. *Rank-major* is
cat(rank 0, rank 1, ...), the result of an all-gather. *Sequence-major* has the rows of each sequence together, in rank
order. *Sequential* is the order of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int, Int64, Shaped
from torch import Tensor

from torch_impl.collectives import large_tensors
from torch_impl.contract import PositiveInt, Rejected, contract
from torch_impl.layouts.divisibility import first, host_offsets, offsets_of, without_fill
from torch_impl.layouts.index_arrays import inverse_permutation


@contract
def _reorder_chunks(
    input_: Shaped[Tensor, "*a"], order: list[int], cu_seqlens: Int[Tensor, " offsets"] | None = None
) -> Shaped[Tensor, "*a"]:
    """Permute equal chunks of dim 1, or of each sequence of dim 0: output chunk j is input chunk `order[j]`.

        input_  "b s w"  or, with offsets of the full stream,  "t w"   ->   the same


    >>> _reorder_chunks(torch.arange(6)[:, None], [1, 0], torch.tensor([0, 2, 6])).flatten()
    tensor([1, 0, 4, 5, 2, 3])

    Cost:   no collective; one copy forward, one backward. One host read of the offsets.
            Saves the index.
    Errors: ValueError if `order` is not a permutation, a length is not a multiple of `len(order)`, the offsets do not
            rise from 0 to the number of rows, or input_ has other dims; TypeError for offsets that are not integers.
    """
    return _chunks(input_, order, cu_seqlens)


@contract
def _undo_attention_load_balancing(
    input_: Shaped[Tensor, "*a"], cp_size: PositiveInt, cu_seqlens: Int[Tensor, " offsets"] | None = None
) -> Shaped[Tensor, "*a"]:
    """Sequence-major DualChunkSwap order to sequential order; shapes and cost as `_reorder_chunks`.

    >>> _undo_attention_load_balancing(torch.arange(6).view(1, 6, 1), 3).flatten()
    tensor([0, 2, 4, 5, 3, 1])

    Errors: as `_reorder_chunks`; ValueError for a cp_size below 1.
    """
    chunks = range(2 * cp_size)
    # Rank r holds chunks r and 2 n - 1 - r: chunks at even indices ascend, chunks at odd indices descend.
    return _chunks(input_, [*chunks[::2], *chunks[::-2]], cu_seqlens)


@contract
def _redo_attention_load_balancing(
    input_: Shaped[Tensor, "*a"], cp_size: PositiveInt, cu_seqlens: Int[Tensor, " offsets"] | None = None
) -> Shaped[Tensor, "*a"]:
    """Sequential order to sequence-major DualChunkSwap order; shapes and cost as `_reorder_chunks`.

    >>> _redo_attention_load_balancing(torch.arange(6).view(1, 6, 1), 3).flatten()
    tensor([0, 5, 1, 4, 2, 3])

    Errors: as `_reorder_chunks`; ValueError for a cp_size below 1.
    """
    last = 2 * cp_size - 1
    order = [chunk for rank in range(cp_size) for chunk in (rank, last - rank)]
    return _chunks(input_, order, cu_seqlens)


@contract
def _deinterleave_packed_seqs(
    input_: Shaped[Tensor, "t w"], cu_seqlens: Int[Tensor, " offsets"], cp_size: PositiveInt
) -> Shaped[Tensor, "t w"]:
    """Rank-major rows to sequence-major rows. `cu_seqlens` are the offsets in one rank's stream (global // cp_size).

    >>> _deinterleave_packed_seqs(torch.arange(12)[:, None], torch.tensor([0, 2, 6]), 2).flatten()
    tensor([ 0,  1,  6,  7,  2,  3,  4,  5,  8,  9, 10, 11])

    Cost:   as `_reorder_chunks`.
    Errors: ValueError if the offsets do not rise from 0 to rows / cp_size, or input_ is not 2-D; TypeError for offsets
            that are not integers.
    """
    return _permute(input_, _interleaving(input_, cu_seqlens, cp_size), 0)


@contract
def _reinterleave_packed_seqs(
    input_: Shaped[Tensor, "t w"], cu_seqlens: Int[Tensor, " offsets"], cp_size: PositiveInt
) -> Shaped[Tensor, "t w"]:
    """Sequence-major rows to rank-major rows, the inverse of `_deinterleave_packed_seqs`.

    >>> _reinterleave_packed_seqs(torch.arange(12)[:, None], torch.tensor([0, 2, 6]), 2).flatten()
    tensor([ 0,  1,  4,  5,  6,  7,  2,  3,  8,  9, 10, 11])

    Cost:   as `_reorder_chunks`.
    Errors: as `_deinterleave_packed_seqs`.
    """
    there, back = _interleaving(input_, cu_seqlens, cp_size)
    return _permute(input_, (back, there), 0)


Both = tuple[Int64[Tensor, " rows"], Int64[Tensor, " rows"]]  # an index array and its inverse


def _chunks(x: Tensor, order: list[int], cu_seqlens: Tensor | None) -> Tensor:
    """Validate the arguments on the host, then permute the chunks."""
    # 1. `order` must be a permutation. Describe the sequences by offsets: [b, s, w] is one sequence of s rows.
    if sorted(order) != list(range(len(order))) or not order:
        raise Rejected(f"order={order} is not a permutation of 0..{len(order) - 1}")
    dim = _token_dim(x, cu_seqlens is not None)
    rows = x.shape[dim]
    host = torch.tensor([0, rows]) if cu_seqlens is None else _offsets(cu_seqlens)
    # 2. The offsets must cover the full stream: local offsets would silently permute rows across sequences.
    if host[-1] != rows:
        ends = f"cu_seqlens ends at {host[-1]} but input_ has {rows} rows"
        raise Rejected(f"{ends}; this function takes the padded offsets of the whole stream")
    # 3. Every sequence must split into equal chunks.
    for j in first(host.diff() % len(order) != 0):
        length = int(host.diff()[j])
        what = f"s={length}" if cu_seqlens is None else f"sequence {j} has length {length}, which"
        padded = length + -length % len(order)
        raise Rejected(f"{what} is not a multiple of {len(order)} chunks; pad to {padded}")
    return _permute(x, _with_inverse(_chunk_rows(host.to(x.device), rows, order)), dim)


def _chunk_rows(offsets: Tensor, rows: int, order: list[int]) -> Int64[Tensor, " rows"]:
    """The input row of output slot i of a sequence: start + order[i // c] * c + i % c, with chunk length c."""
    lengths = offsets.diff()
    # Start and chunk length of each slot's sequence; with a given output_size, nothing waits for the device.
    start = offsets[:-1].repeat_interleave(lengths, output_size=rows)
    chunk = (lengths // len(order)).repeat_interleave(lengths, output_size=rows)
    i = torch.arange(rows, device=offsets.device) - start
    return start + torch.tensor(order, device=offsets.device)[i // chunk] * chunk + i % chunk


def _interleaving(x: Tensor, cu_seqlens: Tensor, cp_size: int) -> Both:
    """The rank-major row of each sequence-major row, and the inverse."""
    rows = x.shape[_token_dim(x, True)]
    host = _offsets(cu_seqlens)
    end = int(host[-1])
    # This takes local offsets, the functions above take global ones; the message names the mix-up.
    if end * cp_size != rows:
        reason = " = the whole stream" if end == rows else f", {end * cp_size} rows over cp={cp_size}, not {rows}"
        local = f"this function takes local offsets (global // {cp_size})"
        raise Rejected(f"cu_seqlens ends at {end}{reason}; {local}")
    return _with_inverse(_sequence_major(host.to(x.device), rows, cp_size))


def _sequence_major(local: Tensor, rows: int, cp_size: int) -> Int64[Tensor, " rows"]:
    """The row of slot i in a sequence of local length l, on rank i // l: rank * (rows / cp_size) + start + i % l."""
    global_lengths = local.diff() * cp_size
    # Local start and length of each slot's sequence; the global start is cp_size times the local start.
    start = local[:-1].repeat_interleave(global_lengths, output_size=rows)
    length = local.diff().repeat_interleave(global_lengths, output_size=rows)
    i = torch.arange(rows, device=local.device) - start * cp_size
    return i // length * (rows // cp_size) + start + i % length


def _with_inverse(index: Tensor) -> Both:
    return index, inverse_permutation(index)


def _permute(x: Tensor, index: Both, dim: int) -> Tensor:
    return _Permute.apply(x, *index, dim)


class _Permute(torch.autograd.Function):
    """Permute rows: each row occurs once, so the gradient is a gather by the inverse and needs no sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index, back)
        ctx.dim = dim
        return large_tensors.index_select(x, index, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        index, back = ctx.saved_tensors
        # Apply the same Function with both indices swapped, so that the gradient can be differentiated again.
        return _Permute.apply(cotangent, back, index, ctx.dim), None, None, None


def _offsets(cu_seqlens: Tensor) -> Int64[Tensor, " offsets"]:
    return host_offsets(without_fill(offsets_of("cu_seqlens", cu_seqlens)), "cu_seqlens", Rejected)


def _token_dim(x: Tensor, is_packed: bool) -> int:
    """The dim of the tokens: 0 in [t, w] with offsets, 1 in [b, s, w] without."""
    if x.ndim != (2 if is_packed else 3):
        want = "[t, w] goes with cu_seqlens" if is_packed else "[b, s, w] goes without cu_seqlens"
        raise Rejected(f"input_ is {list(x.shape)}; {want}")
    return 0 if is_packed else 1
