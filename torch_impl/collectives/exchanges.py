"""all_to_all and ring_shift: ranks exchange what they hold, and nothing is added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup, Work

from torch_impl.collectives.arguments import (
    checked_dim,
    checked_group,
    checked_lengths,
    cut_lengths,
    joined_lengths,
)


# all_to_all: V -> V
def all_to_all(
    x: Shaped[Tensor, "*a"],
    group: ProcessGroup,
    *,
    split_dim: int,
    concat_dim: int,
    split_lengths: Sequence[int] | None = None,
    concat_lengths: Sequence[int] | None = None,
) -> Shaped[Tensor, "*b"]:
    """Cut x along `split_dim`, send piece j to rank j, join what arrives along `concat_dim` in rank order.

        x  "a/axis b ..."   ->   "a b/axis ..."        for split_dim=1, concat_dim=0

        [A0, A1, A2]        [A0, B0, C0]
        [B0, B1, B2]   =>   [A1, B1, C1]
        [C0, C1, C2]        [A2, B2, C2]

    On a single device: `return x  # Identity!`
    `split_lengths[j]` positions along `split_dim` go to rank j; rank i's piece has `concat_lengths[i]`
    positions along `concat_dim`; without them all pieces are equal. With split_dim == concat_dim the two are
    what this rank sends to and receives from each rank, and both may differ from rank to rank.
    Backward: the same exchange with the two dims and the two lengths changing places.

    Cost:   1 all_to_all of x forward, 1 backward. Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup; ValueError for a dim that x lacks, for lengths that
            do not fit the group or x, or without split_lengths for a size that cannot be shared equally.
    """
    function = "collectives.all_to_all"
    group = checked_group(function, "group", group)
    split_dim = checked_dim(function, "split_dim", split_dim, x)
    concat_dim = checked_dim(function, "concat_dim", concat_dim, x)
    sent = cut_lengths(function, "split_lengths", split_lengths, x.shape[split_dim], split_dim, group)
    if split_dim != concat_dim:
        held = x.shape[concat_dim]
        received = joined_lengths(function, "concat_lengths", concat_lengths, held, concat_dim, group)
    else:
        received = (
            sent if concat_lengths is None else checked_lengths(function, "concat_lengths", concat_lengths, group)
        )
    return _AllToAll.apply(x, group, split_dim, concat_dim, sent, received)


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
        return _exchanged(x, group, split_dim, concat_dim, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (split_dim, concat_dim), (sent, received) = ctx.dims, ctx.lengths
        gradient = _exchanged(cotangent, ctx.group, concat_dim, split_dim, received, sent)
        return gradient, None, None, None, None, None


def _exchanged(
    x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int, sent: list[int], received: list[int]
) -> Tensor:
    """One all_to_all of flat pieces: each piece may have a shape of its own."""
    pieces = x.split(sent, dim=split_dim)
    shapes = []
    for length in received:
        shape = list(x.shape)
        shape[split_dim] = sent[group.rank()]
        shape[concat_dim] = length  # after the line above: with equal dims what arrives is as long as `received` says
        shapes.append(shape)
    sizes = [math.prod(shape) for shape in shapes]
    # Pieces along dim 0 lie one after another: cut there, x is the message; joined there, the message is the result.
    outbox = x.reshape(-1) if split_dim == 0 else torch.cat([piece.reshape(-1) for piece in pieces])
    inbox = outbox.new_empty(sum(sizes))
    dist.all_to_all_single(inbox, outbox, sizes, [piece.numel() for piece in pieces], group=group)
    if concat_dim == 0:
        return inbox.view(sum(received), *shapes[0][1:])
    arrived = [flat.view(shape) for flat, shape in zip(inbox.split(sizes), shapes, strict=True)]
    return torch.cat(arrived, dim=concat_dim)


# ring_shift: V -> V
def ring_shift(x: Shaped[Tensor, "*a"], group: ProcessGroup, shift: int = 1) -> Shaped[Tensor, "*a"]:
    """What rank `r - shift` of the group holds, on rank r. All ranks hold the same shape.

        x  "..." (own value on each rank)   ->   "..." (own value on each rank)

        Ax        Az
        Ay   =>   Ax        for shift=1
        Az        Ay

    Backward: the cotangent, shifted the other way.

    Cost:   1 send and 1 recv of x forward, the same backward, posted together so that no rank waits for
            another to post first; none where shift is a multiple of the group's size. Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup.
    """
    return _RingShift.apply(x, checked_group("collectives.ring_shift", "group", group), shift)


def start_ring_shift(tensors: Sequence[Tensor], group: ProcessGroup, shift: int = 1) -> tuple[list[Tensor], list[Work]]:
    """Post the shift of several tensors over `group` and return at once: (what arrives, the works to wait for).

        tensors  "..." (own values on each rank)   ->   "..." (those of rank r - shift, on rank r)

    No gradient. Read no arriving tensor and write to none of `tensors` before every work has been waited for.

    Cost:   1 send and 1 recv of each tensor; none, but a copy, where shift is a multiple of the group's size.
    """
    rank, world = group.rank(), group.size()
    if shift % world == 0:
        return [x.clone(memory_format=torch.contiguous_format) for x in tensors], []
    to, source = (rank + shift) % world, (rank - shift) % world
    sent = [x.contiguous() for x in tensors]
    arriving = [torch.empty_like(x) for x in sent]
    messages = [P2POp(dist.isend, x, group=group, group_peer=to) for x in sent]
    messages += [P2POp(dist.irecv, x, group=group, group_peer=source) for x in arriving]
    return arriving, dist.batch_isend_irecv(messages)


class _RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, shift: int) -> Tensor:
        ctx.group, ctx.shift = group, shift
        return _shifted(x, group, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return _shifted(cotangent, ctx.group, -ctx.shift), None, None


def _shifted(x: Tensor, group: ProcessGroup, shift: int) -> Tensor:
    (arriving,), works = start_ring_shift([x], group, shift)
    for work in works:
        work.wait()
    return arriving
