"""Transports that bring keys and values to the ranks that attend to them: around a ring, step by step, or all at once.

"Keys" means both K and V; they travel in one buffer. The *source* of a buffer is the rank that owns its keys. The
*route* (`key_routes`) decides which rows travel, and how far.

Attention around a ring takes *steps*: in step i rank r attends to the keys of rank r - i. Before each step but step 0 a
*message* brings it these keys from rank r - 1, if the route takes them that far. The gradient of keys is a sum over the
ranks that attended to them. In backward the keys go around again, and one step behind them goes the *partial sum* of
their gradient: each rank adds its term, and the last rank sends the sum to the source. If all keys travel 2 ranks on,
rank r does this:

    forward     step 0    attends to its own keys, while they are sent to r + 1
                step 1    attends to the keys of r - 1, while they are sent to r + 1
                step 2    attends to the keys of r - 2
    backward    step 1    computes the gradient of the keys of r - 1, the first term of their sum; sends it to r + 1
                step 2    computes the gradient of the keys of r - 2; waits for the partial sum, which r - 1 sent after
                          its step 1; adds; sends the sum to the source, r - 2
                step 0    computes the gradient of its own keys; waits for the sum, which r + 2 sent; adds

A halo sends each rank the rows that it needs, by one all_to_all, while the rank attends to its own keys. The gradients
go straight to the source by another all_to_all, at the end of backward, which waits for it.

An all-gather is one collective instead of a ring; in return, every rank has all keys in memory during a call.
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
]  # another number of rows: jaxtyping binds a dim's name to one size in a function


@dataclass(frozen=True)
class PendingBuffer:
    """A buffer that may not have arrived yet; `wait` returns it.

    `sent` is the buffer that this rank sends at the same time. The reference keeps its memory alive; do not write into
    it until `buffer` has arrived.
    """

    buffer: Tensor
    sent: Tensor
    works: list[Work]

    @staticmethod
    def completed(x: Tensor) -> PendingBuffer:
        """A buffer that is already on this rank."""
        return PendingBuffer(x, x, [])

    def wait(self) -> Tensor:
        """The buffer, once it has arrived; later calls do not wait."""
        while self.works:
            self.works.pop().wait()
        return self.buffer


@runtime_checkable  # so that annotations can be checked at run time
class KVTransport(Protocol):
    """Brings keys to other ranks, and their gradients back."""

    def fetch(self, local_kv: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        """Yield (source, its keys) for each source that sends keys here, and for this rank itself, with `local_kv`.

        A source that sends no keys may be yielded without rows; the schedule has no blocks for it. Do not write into
        the keys: a send may be in flight.
        """
        ...

    def backward_transport(self, local_kv: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        """The transport for one backward, which fetches the same keys again and sums gradients in `dtype`."""
        ...


@runtime_checkable
class BackwardTransport(Protocol):
    """One backward: iterate over it, adding this rank's gradient of each source's keys; then call `local_gradient`."""

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        """Yield (source, its keys, the buffer to which this rank adds the keys' gradient).

        Compute the gradient before waiting for the buffer, which travels in the meantime in a ring.
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
    """Send keys around a ring, from each source as far as its reach.

    Cost:   forward 1 message of K and V together, a send and a recv, for each rank that a source's keys travel on;
            backward as many again, and as many for their gradient.
    """

    group: ProcessGroup
    route: RingRoute

    def fetch(self, local_kv: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        pending_kv = self.post_messages(local_kv[self.route.rows], 1)
        yield self.route.rank, local_kv
        for step in range(1, self.route.last_step + 1):
            # 1. Wait for the keys of this step.
            kv = pending_kv.wait()
            # 2. Send them on before using them, so that they travel while this rank attends to them.
            pending_kv = self.post_messages(kv, step + 1)
            # 3. The caller attends to them.
            yield self.source(step), kv

    def source(self, step: int) -> int:
        """The source of the keys that this rank attends to in a step."""
        return (self.route.rank - step) % len(self.route.reach)

    def receives(self, step: int) -> bool:
        """Whether this rank receives keys for a step: whether the source's keys travel that far."""
        return self.route.reach[self.source(step)] >= step

    def receive_buffer(self, like: KVBuffer, step: int) -> OtherKVBuffer:
        """An uninitialised buffer for the rows that this rank receives for a step, possibly none."""
        return like.new_empty(self.route.counts[self.source(step)] * self.receives(step), *like.shape[1:])

    def post_messages(self, kv: KVBuffer, step: int) -> PendingBuffer:
        """Send `kv`, the keys of the step before, to the next rank if they travel on; receive the keys of `step`."""
        rank, n = self.route.rank, len(self.route.reach)
        sent = [((rank + 1) % n, kv)] if self.route.reach[self.source(step - 1)] >= step else []
        arriving = self.receive_buffer(kv, step)
        received = [((rank - 1) % n, arriving)] if self.receives(step) else []
        return PendingBuffer(arriving, kv, start_messages(sent, received, self.group))

    def backward_transport(self, local_kv: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        # The sum of a source's gradient begins as zeros on the next rank, the first one that receives its keys.
        partial_sum = self.receive_buffer(local_kv.new_empty(0, *local_kv.shape[1:], dtype=dtype), 1).zero_()
        return _RingBackward(self, local_kv, PendingBuffer.completed(partial_sum))


@dataclass
class _RingBackward:
    """Steps 1, 2, ... of the ring, and then step 0, because the sum for this rank's keys arrives last.

    `partial_sum` is the partial sum for the current step's keys or, once that is sent, for the next step's.
    `returned_sum` is the other ranks' gradient of the keys that this rank sent; None if it sent none. `local_dkv` is
    the gradient of all this rank's keys, to which the caller adds this rank's own term. It is one of two buffers:

        all keys were sent      `returned_sum` itself, so that the caller waits for it and adds to it
        only some, or none      zeros for all keys; `local_gradient` adds `returned_sum` at the rows that were sent
    """

    ring: Ring
    local_kv: KVBuffer
    partial_sum: PendingBuffer
    returned_sum: PendingBuffer | None = None
    local_dkv: PendingBuffer = field(init=False)

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        # 1. Send the keys around again, from step 1 on.
        keys_of_steps = self.ring.fetch(self.local_kv)
        next(keys_of_steps)
        for step, (source, kv) in enumerate(keys_of_steps, 1):
            # 2. The caller computes its gradient while the partial sum travels, waits for the sum, and adds.
            yield source, kv, self.partial_sum
            # 3. Send the sum after its keys.
            self._post_messages(self.partial_sum.wait(), step + 1)
        # 4. Step 0: the caller adds this rank's own term, which is not sent, while the other ranks' sum travels.
        if self.returned_sum is None or len(self.returned_sum.buffer) < len(self.local_kv):
            zeros = torch.zeros_like(self.local_kv, dtype=self.partial_sum.buffer.dtype)
            self.local_dkv = PendingBuffer.completed(zeros)
        else:
            self.local_dkv = self.returned_sum
        yield self.ring.route.rank, self.local_kv, self.local_dkv

    def _post_messages(self, partial_sum: KVBuffer, step: int) -> None:
        """Send the partial sum of the step before, receive the one of `step`, and the returned sum when it is due.

        These are up to three messages, for three sources' keys; each source's reach decides whether there is one.
        """
        ring, reach = self.ring, self.ring.route.reach
        rank, n, source = ring.route.rank, len(reach), ring.source(step - 1)
        # 1. Send the sum for the keys of step - 1, if this rank received them: to the next rank if the keys went on
        #    there, else to their source.
        target = (rank + 1) % n if reach[source] >= step else source
        sent = [(target, partial_sum)] if ring.receives(step - 1) else []
        # 2. Receive the sum for the keys of `step` from the rank before, if this rank receives these keys.
        arriving = ring.receive_buffer(partial_sum, step)
        received = [((rank - 1) % n, arriving)] if ring.receives(step) else []
        # 3. Receive the sum for this rank's own keys, from the last rank that received them, reach[rank] ranks on,
        #    after the step in which that rank adds its term.
        is_returning = reach[rank] == step - 1
        returning = partial_sum.new_empty(ring.route.counts[rank] * is_returning, *partial_sum.shape[1:])
        received += [((rank + reach[rank]) % n, returning)] if is_returning else []
        works = start_messages(sent, received, ring.group)
        self.partial_sum = PendingBuffer(arriving, partial_sum, works)
        if is_returning:
            self.returned_sum = PendingBuffer(returning, partial_sum, works)

    def local_gradient(self) -> KVBuffer:
        self.partial_sum.wait()  # the last messages that this rank sent
        total = self.local_dkv.wait()
        # Add other ranks' terms, unless they are already in `local_dkv`.
        if self.returned_sum is not None and self.returned_sum is not self.local_dkv:
            total[self.ring.route.rows] += self.returned_sum.wait()
        return total


@dataclass(frozen=True)
class Halo:
    """Send each rank the rows that it needs, all at once.

    Cost:   forward 1 all_to_all of K and V together; backward the same, and 1 of their gradients.
    """

    group: ProcessGroup
    route: HaloRoute

    def fetch(self, local_kv: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        # 1. Send and receive while this rank attends to its own keys.
        pending_kv = self.exchange(local_kv[self.route.rows], self.route.sent, self.route.received)
        yield self.route.rank, local_kv
        # 2. The keys of all other sources arrive together; skip sources that send none, such as this rank itself.
        for source, kv in enumerate(pending_kv.wait().split(self.route.received)):
            if len(kv):
                yield source, kv

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingBuffer:
        """Post the all_to_all of `sent[r]` rows of x to each rank r and `received[s]` rows from each rank s."""
        arriving, works = start_all_to_all(x, sent, received, self.group)
        return PendingBuffer(arriving, x, works)

    def backward_transport(self, local_kv: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        remote_dkv = local_kv.new_zeros(sum(self.route.received), *local_kv.shape[1:], dtype=dtype)
        return _HaloBackward(self, local_kv, remote_dkv, torch.zeros_like(local_kv, dtype=dtype))


@dataclass
class _HaloBackward:
    """This rank's own keys, then the received keys.

    `remote_dkv` is this rank's gradient of the received keys. `local_dkv` is its gradient of its own keys, to which
    `local_gradient` adds the other ranks' gradients.
    """

    halo: Halo
    local_kv: KVBuffer
    remote_dkv: OtherKVBuffer
    local_dkv: KVBuffer

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        remote_views = self.remote_dkv.split(self.halo.route.received)  # the rows of each source
        for source, kv in self.halo.fetch(self.local_kv):
            dkv = self.local_dkv if kv is self.local_kv else remote_views[source]
            yield source, kv, PendingBuffer.completed(dkv)

    def local_gradient(self) -> KVBuffer:
        route = self.halo.route
        returned = self.halo.exchange(self.remote_dkv, route.received, route.sent).wait()
        # Add rank by rank: a row that several ranks need has a gradient from each of them.
        for rows, gradient in zip(route.rows.split(route.sent), returned.split(route.sent), strict=True):
            self.local_dkv[rows] += gradient
        return self.local_dkv


@dataclass(frozen=True)
class AllGather:
    """Gather all keys at once; rank r has `counts[r]` rows.

    Cost: forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients.
    """

    group: ProcessGroup
    counts: tuple[int, ...]

    def fetch(self, local_kv: KVBuffer) -> Iterator[tuple[int, KVBuffer]]:
        yield from enumerate(all_gather_concat(local_kv, self.group, 0, self.counts).split(self.counts))

    def backward_transport(self, local_kv: KVBuffer, dtype: torch.dtype) -> BackwardTransport:
        all_dkv = local_kv.new_zeros(sum(self.counts), *local_kv.shape[1:], dtype=dtype)
        return _AllGatherBackward(self, local_kv, all_dkv)


@dataclass
class _AllGatherBackward:
    """All sources in rank order. `all_dkv` is this rank's gradient of all keys; `local_gradient` sums it over ranks."""

    all_gather: AllGather
    local_kv: KVBuffer
    all_dkv: Float[Tensor, "all_keys 2 b hk p"]  # a row for each key of each rank

    def __iter__(self) -> Iterator[tuple[int, KVBuffer, PendingBuffer]]:
        source_gradients = self.all_dkv.split(self.all_gather.counts)
        for source, kv in self.all_gather.fetch(self.local_kv):
            yield source, kv, PendingBuffer.completed(source_gradients[source])

    def local_gradient(self) -> KVBuffer:
        return reduce_scatter_sum(self.all_dkv, self.all_gather.group, 0, self.all_gather.counts)
