"""How keys and values reach the ranks that attend to them: around a ring, hop by hop, or all at once by an all-gather.

"Keys" means both K and V; they travel in one buffer. The *source* of a buffer is the rank whose keys it has.

In a ring, a *hop* shifts every rank's buffer to the next rank: after h hops rank r has the keys of rank r - h. The
gradients of a source's keys are *sums* over the ranks that attended to them. In backward the keys go around again, and
the sums travel one hop behind them. What rank r does, for 2 hops:

    forward     hop 0    attends to its own keys, while they are sent to r + 1
                hop 1    attends to the keys of r - 1, while they are sent to r + 1
                hop 2    attends to the keys of r - 2
    backward    hop 1    computes gradients of the keys of r - 1; the sums are these alone; sends the sums to r + 1
                hop 2    computes gradients of the keys of r - 2; waits for the sums, which r - 1 sent after its hop 1;
                         adds; sends the sums home, to r - 2
                last     computes gradients of its own keys; waits for the sums, which r + 2 sent home; adds

A window over contiguous rows needs only the first hops; without a hop, a rank sees its own keys alone.

An all-gather is one collective instead of a ring, and shards may be uneven; in return, every rank has all keys in
memory for the length of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torch_impl.collectives import start_ring_shift
from torch_impl.collectives.plain import all_gather_concat, reduce_scatter_sum
from torch_impl.context_parallel.block_schedule import BlockSchedule

KVBuffer = Float[Tensor, "keys 2 b hk p"]  # K and V of some rows in one buffer; rows are split without a copy


@dataclass(frozen=True)
class PendingBuffer:
    """A buffer that may still be being received; `wait` returns it.

    `sent` is the buffer that this rank sends at the same time. This reference keeps its memory alive; nothing may be
    written into it until `buffer` has arrived.
    """

    buffer: Tensor
    sent: Tensor
    works: list[Work]

    @staticmethod
    def completed(x: Tensor) -> PendingBuffer:
        """A buffer that is on this rank already, with nothing to wait for."""
        return PendingBuffer(x, x, [])

    @staticmethod
    def start_shift(x: Tensor, group: ProcessGroup, shift: int) -> PendingBuffer:
        """Post the send of `x` to the rank `shift` ranks on, and the receive from the rank `shift` ranks back."""
        (received,), works = start_ring_shift([x], group, shift)
        return PendingBuffer(received, x, works)

    def wait(self) -> Tensor:
        """The buffer, once it has arrived; later calls do not wait."""
        while self.works:
            self.works.pop().wait()
        return self.buffer


@runtime_checkable  # so that annotations can be checked at run time
class KVTransport(Protocol):
    """How keys reach the other ranks, and how their gradients return, in float32 or wider."""

    def fetch(self, local: KVBuffer, schedule: BlockSchedule) -> Iterator[tuple[int, KVBuffer]]:
        """(source, its keys) for each rank whose keys this rank sees; `local` are this rank's.

        The keys may be being sent: nothing may be written into them.
        """
        ...

    def backward(self, local: KVBuffer, schedule: BlockSchedule, dtype: torch.dtype) -> BackwardTransport:
        """The same keys once more, with the sums of their gradients in `dtype`."""
        ...


@runtime_checkable
class BackwardTransport(Protocol):
    """One backward. Iterate over it, adding to the sums at each source; then call `local_gradient`."""

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        """(source, its keys, the sums that this rank adds their gradients to).

        Compute the gradients first and wait for the sums then: these travel in the meantime.
        """
        ...

    def local_gradient(self) -> KVBuffer:
        """The gradient of this rank's keys, summed over all ranks."""
        ...


@dataclass(frozen=True)
class Ring:
    """Keys that travel around a ring for `schedule.hops` hops; with 0 hops nothing is sent over `group`.

    Cost:   forward `hops` shifts of K and V together; backward as many of K and V, and of their gradients.
    """

    group: ProcessGroup

    def fetch(self, local: KVBuffer, schedule: BlockSchedule) -> Iterator[tuple[int, KVBuffer]]:
        pending_kv = PendingBuffer.completed(local)
        for hop in range(schedule.hops + 1):
            # 1. Wait for the keys of this hop.
            kv = pending_kv.wait()
            # 2. Send them on before they are used, so that the next hop overlaps with the attention of this one.
            if hop < schedule.hops:
                pending_kv = PendingBuffer.start_shift(kv, self.group, 1)
            # 3. The caller attends to them.
            yield _source(schedule, hop), kv

    def backward(self, local: KVBuffer, schedule: BlockSchedule, dtype: torch.dtype) -> BackwardTransport:
        # The sums for a source's keys start as zeros at the next rank, the first one that the keys come to.
        sums = PendingBuffer.completed(torch.zeros_like(local, dtype=dtype))
        return _RingBackward(self, local, schedule, sums)


@dataclass
class _RingBackward:
    """Hops 1, 2, ... of the ring, then this rank's own keys: while its gradients are computed, their sums come home."""

    ring: Ring
    local: KVBuffer
    schedule: BlockSchedule
    sums: PendingBuffer

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        group, hops = self.ring.group, self.schedule.hops
        # 1. The keys go around again. Hop 0, this rank's own keys, comes last here.
        keys_of_hops = self.ring.fetch(self.local, self.schedule)
        next(keys_of_hops)
        for hop, (source, kv) in enumerate(keys_of_hops, 1):
            # 2. The caller computes its blocks while the sums are on their way, waits for the sums, and adds.
            yield source, kv, self.sums
            # 3. Send the sums after their keys; from the last hop straight home, to their source.
            self.sums = PendingBuffer.start_shift(self.sums.wait(), group, 1 if hop < hops else -hops)
        # 4. The sums for this rank's keys are on their way. The caller adds its own block, whose gradient is not sent.
        yield self.schedule.rank, self.local, self.sums

    def local_gradient(self) -> KVBuffer:
        return self.sums.wait()


def _source(schedule: BlockSchedule, hop: int) -> int:
    """The rank whose keys are on this rank after `hop` hops."""
    return (schedule.rank - hop) % len(schedule.blocks)


@dataclass(frozen=True)
class AllGather:
    """All keys gathered at once.

    Cost: forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients.
    """

    group: ProcessGroup

    def fetch(self, local: KVBuffer, schedule: BlockSchedule) -> Iterator[tuple[int, KVBuffer]]:
        yield from enumerate(all_gather_concat(local, self.group, 0, schedule.counts).split(schedule.counts))

    def backward(self, local: KVBuffer, schedule: BlockSchedule, dtype: torch.dtype) -> BackwardTransport:
        sums = local.new_zeros(sum(schedule.counts), *local.shape[1:], dtype=dtype)
        return _AllGatherBackward(self, local, schedule, sums)


@dataclass
class _AllGatherBackward:
    """All sources in order. `sums` are this rank's gradients of all keys; at the end they are summed over the ranks."""

    all_gather: AllGather
    local: KVBuffer
    schedule: BlockSchedule
    sums: Float[Tensor, "all_keys 2 b hk p"]  # a row for each key of each rank

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        views = self.sums.split(self.schedule.counts)  # the rows of each source
        for source, kv in self.all_gather.fetch(self.local, self.schedule):
            yield source, kv, PendingBuffer.completed(views[source])

    def local_gradient(self) -> KVBuffer:
        return reduce_scatter_sum(self.sums, self.all_gather.group, 0, self.schedule.counts)
