"""all_to_all and ring_shift: ranks exchange tensors without summing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from torch_impl.collectives import large_tensors
from torch_impl.collectives.lengths import dim_from_front, lengths_of_ranks, lengths_to_gather, lengths_to_scatter
from torch_impl.contract import Group, Rejected, ShardedAny, Tensors, contract


# all_to_all: V -> V
@contract
def all_to_all(
    x: ShardedAny[Tensor, "a/axis ..."],
    group: Group[ProcessGroup, "axis"],
    *,
    split_dim: int,
    concat_dim: int,
    split_lengths: Sequence[int] | None = None,
    concat_lengths: Sequence[int] | None = None,
) -> ShardedAny[Tensor, "a b/axis ..."]:
    """Split x along `split_dim`, send shard j to rank j, and concatenate the received shards along `concat_dim`.

        [A0, A1, A2]        [A0, B0, C0]
        [B0, B1, B2]   =>   [A1, B1, C1]        for split_dim=1, concat_dim=0
        [C0, C1, C2]        [A2, B2, C2]

    Shards are concatenated in rank order. On a single device: `return x`, the identity.
    `split_lengths[j]` positions along `split_dim` go to rank j; the shard of rank i has `concat_lengths[i]`
    positions along `concat_dim`; without them all shards are equal. With split_dim == concat_dim the two are the
    lengths that this rank sends to and receives from each rank, and may differ from rank to rank.
    Backward: the same exchange with dims and lengths swapped.

    Cost:   1 all_to_all of x forward, 1 backward. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for a dim that x lacks, for lengths that do not fit the
            group or x, or without split_lengths for a size that the group's size does not divide.
    """
    split_dim = dim_from_front("split_dim", split_dim, x)
    concat_dim = dim_from_front("concat_dim", concat_dim, x)
    sent = lengths_to_scatter("split_lengths", split_lengths, x, split_dim, group)
    if split_dim != concat_dim:
        received = lengths_to_gather("concat_lengths", concat_lengths, x, concat_dim, group)
    else:  # along one dim, a rank may receive a different length than it has
        received = sent if concat_lengths is None else lengths_of_ranks("concat_lengths", concat_lengths, group)
    return _AllToAll.apply(x, group, split_dim, concat_dim, sent, received)


# Gradient types: V -> V.
def exchange_rows(x: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """`all_to_all` of rows, for code behind a contract: sent[j] of them to rank j, received[i] from rank i."""
    return _AllToAll.apply(x, group, 0, 0, sent, received)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        split_dim: int,
        concat_dim: int,
        sent: list[int],
        received: list[int],
    ) -> Tensor:
        ctx.group, ctx.dims, ctx.lengths = group, (split_dim, concat_dim), (sent, received)
        return _exchange(x, group, split_dim, concat_dim, sent, received)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        # Each shard of the cotangent goes back to the rank that sent it: dims and lengths are swapped.
        (split_dim, concat_dim), (sent, received) = ctx.dims, ctx.lengths
        gradient = _AllToAll.apply(cotangent, ctx.group, concat_dim, split_dim, received, sent)
        return gradient, None, None, None, None, None


def _exchange(
    x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int, sent: list[int], received: list[int]
) -> Tensor:
    """One all_to_all of flattened shards, which may differ in shape."""
    # 1. The shape of the shard that each rank sends to this one.
    shards = x.split(sent, dim=split_dim)
    shapes = []
    for length in received:
        shape = list(x.shape)
        shape[split_dim] = sent[group.rank()]
        shape[concat_dim] = length  # after the line above: with equal dims `received` decides
        shapes.append(shape)
    sizes = [math.prod(shape) for shape in shapes]
    # 2. Pack and exchange. Shards along dim 0 are adjacent in memory, so x itself is the message. A flat view of some
    #    strides is not contiguous, and backends would reject it.
    message = x.reshape(-1).contiguous() if split_dim == 0 else torch.cat([shard.reshape(-1) for shard in shards])
    received_message = large_tensors.empty((sum(sizes),), x.dtype, x.device)
    dist.all_to_all_single(received_message, message, sizes, [shard.numel() for shard in shards], group=group)
    # 3. Unpack. For a concatenation along dim 0, the received message is the result.
    if concat_dim == 0:
        return received_message.view(sum(received), *shapes[0][1:])
    blocks = [flat.view(shape) for flat, shape in zip(received_message.split(sizes), shapes, strict=True)]
    return torch.cat(blocks, dim=concat_dim)


# ring_shift: V -> V
@contract
def ring_shift(
    x: ShardedAny[Tensor, "..."], group: Group[ProcessGroup, "axis"], shift: int = 1
) -> ShardedAny[Tensor, "..."]:
    """Send x to rank r + shift, and return the tensor of rank r - shift. All ranks pass the same shape.

        Ax        Az
        Ay   =>   Ax        for shift=1
        Az        Ay

    Backward: the cotangent, shifted the other way.

    Cost:   1 send and 1 recv of x forward, the same backward, posted together so that no rank waits for another to post
            first; none if shift is a multiple of the group's size. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup or shift is not an integer.
    """
    return _RingShift.apply(x, group, shift)


@contract
def start_ring_shift(
    tensors: Tensors, group: Group[ProcessGroup, "axis"], shift: int = 1
) -> tuple[list[Tensor], list[Work]]:
    """Start shifting several tensors over `group` and return at once: (received tensors, works to wait for).

        tensors  "..."   ->   "..."   (on rank r, the tensors of rank r - shift)

    No gradient. Wait for every work before reading a received tensor or writing to any of `tensors`.

    Cost:   1 send and 1 recv of each tensor; if shift is a multiple of the group's size, only a copy.
    Errors: TypeError if group is not a ProcessGroup or shift is not an integer; ValueError for no tensors.
    """
    if not tensors:
        raise Rejected("tensors is empty; pass what to shift")
    return _start(tensors, group, shift)


def _start(tensors: Sequence[Tensor], group: ProcessGroup, shift: int) -> tuple[list[Tensor], list[Work]]:
    rank, world = group.rank(), group.size()
    # A copy here too, so that the result never aliases the argument.
    if shift % world == 0:
        return [x.clone(memory_format=torch.contiguous_format) for x in tensors], []
    to, source = (rank + shift) % world, (rank - shift) % world
    sent = [x.contiguous() for x in tensors]
    received = [large_tensors.empty(x.shape, x.dtype, x.device) for x in sent]
    # One batch of sends and receives: if every rank of a ring blocked in its send, none would reach its receive.
    messages = [P2POp(dist.isend, x, group=group, group_peer=to) for x in sent]
    messages += [P2POp(dist.irecv, x, group=group, group_peer=source) for x in received]
    return received, dist.batch_isend_irecv(messages)


class _RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, shift: int) -> Tensor:
        ctx.group, ctx.shift = group, shift
        return _shift(x, group, shift)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return _RingShift.apply(cotangent, ctx.group, -ctx.shift), None, None


def _shift(x: Tensor, group: ProcessGroup, shift: int) -> Tensor:
    (received,), works = _start([x], group, shift)
    for work in works:
        work.wait()
    return received
