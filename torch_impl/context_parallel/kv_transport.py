"""How keys and values reach the ranks that attend to them: around a ring, hop by hop, or all at once.

"Keys" means both K and V; they travel in one buffer. The *source* of a buffer is the rank whose keys it has. Which rows
of them travel, and how far, is the *route* (`key_routes`).

In a ring, a *hop* sends a rank's buffer to the next rank: after h hops rank r has the keys of rank r - h, if the route
takes them so far. The gradients of a source's keys are *sums* over the ranks that attended to them. In backward the
keys go around again, and the sums travel one hop behind them. What rank r does, where all keys travel 2 hops:

    forward     hop 0    attends to its own keys, while they are sent to r + 1
                hop 1    attends to the keys of r - 1, while they are sent to r + 1
                hop 2    attends to the keys of r - 2
    backward    hop 1    computes gradients of the keys of r - 1; the sums are these alone; sends the sums to r + 1
                hop 2    computes gradients of the keys of r - 2; waits for the sums, which r - 1 sent after its hop 1;
                         adds; sends the sums home, to r - 2
                last     computes gradients of its own keys; waits for the sums, which r + 2 sent home; adds

A halo sends each rank the rows that it needs, by one all_to_all, and their gradients straight home by another. A rank
attends to its own keys in the meantime.

An all-gather is one collective instead of a ring; in return, every rank has all keys in memory for the length of a
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torch_impl.collectives.plain import (
    all_gather_concat,
    reduce_scatter_sum,
    start_all_to_all,
    start_messages,
)
from torch_impl.context_parallel.key_routes import HaloRoute, RingRoute

KVBuffer = Float[Tensor, "keys 2 b hk p"]  # K and V of some rows in one buffer; rows are split without a copy
OtherKVBuffer = Float[
    Tensor, "other_keys 2 b hk p"
]  # of other rows: jaxtyping binds a dim's name to one size in a function


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

    def wait(self) -> Tensor:
        """The buffer, once it has arrived; later calls do not wait."""
        while self.works:
            self.works.pop().wait()
        return self.buffer


@runtime_checkable  # so that annotations can be checked at run time
class KVTransport(Protocol):
    """How keys reach the other ranks, and how their gradients return, in float32 or wider."""

    def fetch(self, local: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        """(source, its keys) for each rank whose keys come to this rank; `local` are this rank's.

        A source whose keys do not come may be yielded with no rows, and has no blocks. The keys may be being sent:
        nothing may be written into them.
        """
        ...

    def backward(self, local: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        """What yields the same keys again and carries the sums of their gradients back, in `dtype`."""
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


def transport_of(route: RingRoute | HaloRoute, group: ProcessGroup) -> KVTransport:
    """The transport of a route over `group`."""
    return Ring(group, route) if isinstance(route, RingRoute) else Halo(group, route)


@dataclass(frozen=True)
class Ring:
    """Keys that travel around a ring, those of each source as far as its reach.

    Cost:   forward 1 send and 1 recv of K and V together for each hop that they travel; backward the same, and as many
            of their gradients.
    """

    group: ProcessGroup
    route: RingRoute

    def fetch(self, local: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        pending_kv = self.start_hop(local[self.route.rows], 1)
        yield self.route.rank, local
        for hop in range(1, self.route.hops + 1):
            # 1. Wait for the keys of this hop.
            kv = pending_kv.wait()
            # 2. Send them on before they are used, so that the next hop overlaps with the attention of this one.
            pending_kv = self.start_hop(kv, hop + 1)
            # 3. The caller attends to them.
            yield self.source(hop), kv

    def source(self, hop: int) -> int:
        """The rank whose keys come to this rank with a hop."""
        return (self.route.rank - hop) % len(self.route.reach)

    def arrives(self, hop: int) -> bool:
        """Whether keys come to this rank with a hop: those of its source travel so far."""
        return self.route.reach[self.source(hop)] >= hop

    def empty(self, like: KVBuffer, hop: int) -> OtherKVBuffer:
        """A buffer for the rows that arrive with a hop."""
        return like.new_empty(self.route.counts[self.source(hop)] * self.arrives(hop), *like.shape[1:])

    def start_hop(self, kv: KVBuffer, hop: int) -> PendingBuffer:
        """Post a hop: the previous hop's keys to the next rank, if they go on, and a receive from the rank before."""
        rank, n = self.route.rank, len(self.route.reach)
        sent = [((rank + 1) % n, kv)] if self.route.reach[self.source(hop - 1)] >= hop else []
        arriving = self.empty(kv, hop)
        received = [((rank - 1) % n, arriving)] if self.arrives(hop) else []
        return PendingBuffer(arriving, kv, start_messages(sent, received, self.group))

    def backward(self, local: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        # The sums for a source's keys start as zeros at the next rank, the first one that the keys come to.
        sums = self.empty(local.new_empty(0, *local.shape[1:], dtype=dtype), 1).zero_()
        return _RingBackward(self, local, PendingBuffer.completed(sums))


@dataclass
class _RingBackward:
    """Hops 1, 2, ... of the ring, then this rank's own keys: while its gradients are computed, their sums come home."""

    ring: Ring
    local: KVBuffer
    sums: PendingBuffer
    home: PendingBuffer | None = None  # the sums for this rank's keys, if any of these went out
    own: PendingBuffer = field(init=False)  # the gradients of all keys of this rank: `home` itself, if all went out

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        # 1. The keys go around again. Hop 0, this rank's own keys, comes last here.
        keys_of_hops = self.ring.fetch(self.local)
        next(keys_of_hops)
        for hop, (source, kv) in enumerate(keys_of_hops, 1):
            # 2. The caller computes its blocks while the sums are on their way, waits for the sums, and adds.
            yield source, kv, self.sums
            # 3. Send the sums after their keys.
            self._start_hop(self.sums.wait(), hop + 1)
        # 4. The sums for this rank's keys are on their way. The caller adds its own block, whose gradient is not sent.
        if self.home is None or len(self.home.buffer) < len(self.local):
            self.own = PendingBuffer.completed(torch.zeros_like(self.local, dtype=self.sums.buffer.dtype))
        else:
            self.own = self.home
        yield self.ring.route.rank, self.local, self.own

    def _start_hop(self, sums: KVBuffer, hop: int) -> None:
        """Post a hop of the sums, from the last rank that their keys come to straight home, to their source."""
        ring, reach = self.ring, self.ring.route.reach
        rank, n, source = ring.route.rank, len(reach), ring.source(hop - 1)
        sent = [((rank + 1) % n if reach[source] >= hop else source, sums)] if ring.arrives(hop - 1) else []
        arriving = ring.empty(sums, hop)
        received = [((rank - 1) % n, arriving)] if ring.arrives(hop) else []
        is_home = reach[rank] == hop - 1
        home = sums.new_empty(ring.route.counts[rank] * is_home, *sums.shape[1:])
        received += [((rank + reach[rank]) % n, home)] if is_home else []
        works = start_messages(sent, received, ring.group)
        self.sums = PendingBuffer(arriving, sums, works)
        if is_home:
            self.home = PendingBuffer(home, sums, works)

    def local_gradient(self) -> KVBuffer:
        self.sums.wait()  # the last messages that this rank sent
        total = self.own.wait()
        if self.home is not None and self.home is not self.own:
            total[self.ring.route.rows] += self.home.wait()
        return total


@dataclass(frozen=True)
class Halo:
    """The rows that each rank needs, sent to it at once.

    Cost:   forward 1 all_to_all of K and V together; backward the same, and 1 of their gradients.
    """

    group: ProcessGroup
    route: HaloRoute

    def fetch(self, local: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        # 1. Send and receive while this rank attends to its own keys.
        pending_kv = self.start(local[self.route.rows], self.route.sent, self.route.received)
        yield self.route.rank, local
        # 2. The others' have arrived together; a source that sends none, such as this rank itself, has no blocks.
        for source, kv in enumerate(pending_kv.wait().split(self.route.received)):
            if len(kv):
                yield source, kv

    def start(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingBuffer:
        arriving, works = start_all_to_all(x, sent, received, self.group)
        return PendingBuffer(arriving, x, works)

    def backward(self, local: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        sums = local.new_zeros(sum(self.route.received), *local.shape[1:], dtype=dtype)
        return _HaloBackward(self, local, sums, torch.zeros_like(local, dtype=dtype))


@dataclass
class _HaloBackward:
    """This rank's own keys, then those that it received. `sums` are its gradients of these, `own` those of its own."""

    halo: Halo
    local: KVBuffer
    sums: OtherKVBuffer
    own: KVBuffer

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        views = self.sums.split(self.halo.route.received)  # the rows of each source
        for source, kv in self.halo.fetch(self.local):
            is_own = kv is self.local
            yield source, kv, PendingBuffer.completed(self.own if is_own else views[source])

    def local_gradient(self) -> KVBuffer:
        route = self.halo.route
        returned = self.halo.start(self.sums, route.received, route.sent).wait()
        # Rank by rank: a row that several ranks need has a gradient from each.
        for rows, gradient in zip(route.rows.split(route.sent), returned.split(route.sent), strict=True):
            self.own[rows] += gradient
        return self.own


@dataclass(frozen=True)
class AllGather:
    """All keys gathered at once; rank r has `counts[r]` rows of them.

    Cost: forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients.
    """

    group: ProcessGroup
    counts: tuple[int, ...]

    def fetch(self, local: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        yield from enumerate(all_gather_concat(local, self.group, 0, self.counts).split(self.counts))

    def backward(self, local: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        return _AllGatherBackward(self, local, local.new_zeros(sum(self.counts), *local.shape[1:], dtype=dtype))


@dataclass
class _AllGatherBackward:
    """All sources in order. `sums` are this rank's gradients of all keys; at the end they are summed over the ranks."""

    all_gather: AllGather
    local: KVBuffer
    sums: Float[Tensor, "all_keys 2 b hk p"]  # a row for each key of each rank

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        views = self.sums.split(self.all_gather.counts)  # the rows of each source
        for source, kv in self.all_gather.fetch(self.local):
            yield source, kv, PendingBuffer.completed(views[source])

    def local_gradient(self) -> KVBuffer:
        return reduce_scatter_sum(self.sums, self.all_gather.group, 0, self.all_gather.counts)
