"""Exchanges of keys: around a ring, hop by hop, or all at once by an all-gather.

In a ring, K and V go from rank to rank in one buffer; a hop is one shift of that buffer to the next rank. "Keys" means
both K and V. In backward the sums of the gradients of keys travel one hop behind them: each rank adds its terms before
it sends the sums on, and the last hop takes them back to the rank that the keys belong to. A window over contiguous
rows needs only the first hops; without a hop, a rank sees its own keys alone.

An all-gather is one collective instead of a ring, and shards may be uneven; in return, every rank holds all keys for
the length of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
# Called with the source rank, its keys, and a function that waits for the sums that their gradients are added to.
AddGradients = Callable[[int, KVBuffer, Callable[[], KVBuffer]], None]


@runtime_checkable  # so that annotations can be checked at run time
class KVExchange(Protocol):
    """How keys reach the other ranks, and how their gradients return, in float32 or wider."""

    def fetch(self, local: KVBuffer, schedule: BlockSchedule) -> Iterator[tuple[int, KVBuffer]]:
        """Yield each rank whose keys this rank sees, with its keys; `local` are this rank's."""
        ...

    def reduce_gradients(
        self, local: KVBuffer, schedule: BlockSchedule, dtype: torch.dtype, add: AddGradients
    ) -> KVBuffer:
        """Gradients of `local`, this rank's keys, summed over ranks. Calls `add` for each rank whose keys it sees."""
        ...


@dataclass(frozen=True)
class Ring:
    """Keys that travel around a ring for `schedule.hops` hops; with 0 hops nothing is sent over `group`.

    Cost:   forward `hops` shifts of K and V together; backward as many of K and V, and of their gradients.
    """

    group: ProcessGroup

    def fetch(self, local: KVBuffer, schedule: BlockSchedule) -> Iterator[tuple[int, KVBuffer]]:
        in_flight = _InFlight.completed(local)
        for hop in range(schedule.hops + 1):
            # 1. Wait for the keys of this hop.
            kv = in_flight.wait()
            # 2. Send them on before they are used, so that the next hop overlaps with the attention of this one.
            if hop < schedule.hops:
                in_flight = _InFlight.start(kv, self.group, 1)
            # 3. The caller computes here; it must not write into them, since they are being sent.
            yield _source(schedule, hop), kv

    def reduce_gradients(
        self, local: KVBuffer, schedule: BlockSchedule, dtype: torch.dtype, add: AddGradients
    ) -> KVBuffer:
        # 1. The keys go around again. Those of hop 0 are `local`, which come last here.
        arriving = self.fetch(local, schedule)
        next(arriving)
        # 2. The sums for a source's keys start as zeros at its neighbour, the first rank that the keys come to.
        sums = _InFlight.completed(torch.zeros_like(local, dtype=dtype))
        for hop, (source, kv) in enumerate(arriving, 1):
            add(source, kv, sums.wait)  # a function: `add` computes the block before it waits
            # 3. After the block, send the sums after their keys; from the last hop straight back to their source.
            sums = _InFlight.start(sums.wait(), self.group, 1 if hop < schedule.hops else -schedule.hops)
        # 4. Now the sums for this rank's keys arrive. Its own block is computed while they travel.
        add(schedule.rank, local, sums.wait)  # its gradient is never sent
        return sums.wait()


@dataclass(frozen=True)
class _InFlight:
    """A buffer that is being received.

    `sent` is the buffer that this rank sends at the same time. This reference keeps its memory alive; nothing may be
    written into it until `buffer` has arrived.
    """

    buffer: Tensor
    sent: Tensor
    works: list[Work]

    @staticmethod
    def completed(x: Tensor) -> _InFlight:
        """A buffer that is on this rank already, with nothing to wait for."""
        return _InFlight(x, x, [])

    @staticmethod
    def start(x: Tensor, group: ProcessGroup, shift: int) -> _InFlight:
        """Post the send of `x` to the rank `shift` places on, and the receive from the rank `shift` places back."""
        (arriving,), works = start_ring_shift([x], group, shift)
        return _InFlight(arriving, x, works)

    def wait(self) -> Tensor:
        """The buffer, once it has arrived; later calls do not wait."""
        while self.works:
            self.works.pop().wait()
        return self.buffer


def _source(schedule: BlockSchedule, hop: int) -> int:
    """The rank whose keys are on this rank after `hop` hops."""
    return (schedule.rank - hop) % len(schedule.blocks)


@dataclass(frozen=True)
class AllGatherKV:
    """All keys gathered at once.

    Cost: forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients.
    """

    group: ProcessGroup

    def fetch(self, local: KVBuffer, schedule: BlockSchedule) -> Iterator[tuple[int, KVBuffer]]:
        yield from enumerate(all_gather_concat(local, self.group, 0, schedule.counts).split(schedule.counts))

    def reduce_gradients(
        self, local: KVBuffer, schedule: BlockSchedule, dtype: torch.dtype, add: AddGradients
    ) -> KVBuffer:
        # This rank adds into a view of each source's rows; the reduce_scatter then sums the ranks.
        sums = local.new_zeros(sum(schedule.counts), *local.shape[1:], dtype=dtype)
        shares = sums.split(schedule.counts)
        for source, kv in self.fetch(local, schedule):
            add(source, kv, lambda share=shares[source]: share)
        return reduce_scatter_sum(sums, self.group, 0, schedule.counts)
