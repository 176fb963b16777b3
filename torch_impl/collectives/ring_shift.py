"""ring_shift: every rank hands its tensor to the next one around the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup, Work

from torch_impl.collectives.arguments import checked_group


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
