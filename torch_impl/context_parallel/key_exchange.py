"""Keys that travel around a ring, or along a window; without a hop, one rank's own keys.

K and V go from rank to rank in one buffer; the gradients of keys follow them, always after the block that adds to them,
and in the end go home.

The keys of all ranks gathered at once: one message instead of a ring, and shares may be uneven.

Every rank holds all keys for the length of a call.
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
from torch_impl.collectives.plain import gathered, scattered_sum
from torch_impl.context_parallel.block_schedule import BlockSchedule

Buffer = Float[Tensor, "keys 2 b hk p"]  # K and V of some rows in one piece, cut by rows without a copy
# The rank whose keys these are, the keys, and what gives the sums that their gradients are added to.
AddGradients = Callable[[int, Buffer, Callable[[], Buffer]], None]


@runtime_checkable  # so that annotations can be held to it
class Exchange(Protocol):
    """How keys come from all ranks and their gradients go back. K and V are one buffer, gradients float32 or wider."""

    def keys(self, own: Buffer, schedule: BlockSchedule) -> Iterator[tuple[int, Buffer]]:
        """Every rank whose keys are seen, and its keys."""
        ...

    def gradients(self, own: Buffer, schedule: BlockSchedule, dtype: torch.dtype, add: AddGradients) -> Buffer:
        """The gradients of this rank's own keys, from `add` for each rank whose keys are seen, here and elsewhere."""
        ...


@dataclass(frozen=True)
class Ring:
    """As many hops as `schedule` says; without one `group` is never spoken to.

    Cost:   forward `hops` shifts of K and V together; backward as many of K and V, and of their gradients.
    """

    group: ProcessGroup

    def keys(self, own: Buffer, schedule: BlockSchedule) -> Iterator[tuple[int, Buffer]]:
        in_flight = _InFlight.from_here(own)
        for hop in range(schedule.hops + 1):
            here = in_flight.arrived()
            if hop < schedule.hops:
                in_flight = _InFlight.post(here, self.group, 1)
            yield _source(schedule, hop), here

    def gradients(self, own: Buffer, schedule: BlockSchedule, dtype: torch.dtype, add: AddGradients) -> Buffer:
        arriving = self.keys(own, schedule)
        here = next(arriving)
        sums = _InFlight.from_here(torch.zeros_like(own, dtype=dtype))
        for hop, (source, keys) in enumerate(arriving, 1):
            add(source, keys, sums.arrived)  # which waits for them when their block is computed
            # on to the next rank, which adds its own; from the last one home, past those it came by
            sums = _InFlight.post(sums.arrived(), self.group, 1 if hop < schedule.hops else -schedule.hops)
        add(*here, sums.arrived)  # of this rank's own keys: it never leaves
        return sums.arrived()


@dataclass(frozen=True)
class _InFlight:
    """A buffer on its way here. `sent` is what left for the next rank; it must stay as it is until this has arrived."""

    buffer: Tensor
    sent: Tensor
    works: list[Work]

    @staticmethod
    def from_here(x: Tensor) -> _InFlight:
        return _InFlight(x, x, [])

    @staticmethod
    def post(x: Tensor, group: ProcessGroup, shift: int) -> _InFlight:
        (arriving,), works = start_ring_shift([x], group, shift)
        return _InFlight(arriving, x, works)

    def arrived(self) -> Tensor:
        while self.works:
            self.works.pop().wait()
        return self.buffer


def _source(schedule: BlockSchedule, hop: int) -> int:
    """The rank whose keys are here after so many hops."""
    return (schedule.rank - hop) % len(schedule.blocks)


@dataclass(frozen=True)
class AllGatherKeys:
    """Cost: forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients."""

    group: ProcessGroup

    def keys(self, own: Buffer, schedule: BlockSchedule) -> Iterator[tuple[int, Buffer]]:
        yield from enumerate(gathered(own, self.group, 0, schedule.counts).split(schedule.counts))

    def gradients(self, own: Buffer, schedule: BlockSchedule, dtype: torch.dtype, add: AddGradients) -> Buffer:
        sums = own.new_zeros(sum(schedule.counts), *own.shape[1:], dtype=dtype)
        shares = sums.split(schedule.counts)
        for source, keys in self.keys(own, schedule):
            add(source, keys, lambda share=shares[source]: share)
        return scattered_sum(sums, self.group, 0, schedule.counts)
