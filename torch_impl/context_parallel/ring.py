"""Keys that travel around a ring, or along a window; without a hop, one rank's own keys.

K and V go from rank to rank in one buffer; the gradients of keys follow them, always after the block that adds to them,
and in the end go home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torch_impl.collectives import start_ring_shift
from torch_impl.context_parallel.blocks import Buffer
from torch_impl.context_parallel.exchanged import AddGradients
from torch_impl.context_parallel.pairs import Pairs


@dataclass(frozen=True)
class Ring:
    """As many hops as `pairs` says; without one `group` is never spoken to.

    Cost:   forward `hops` shifts of K and V together; backward as many of K and V, and of their gradients.
    """

    group: ProcessGroup

    def keys(self, own: Buffer, pairs: Pairs) -> Iterator[tuple[int, Buffer]]:
        travelling = _Travelling.from_here(own)
        for hop in range(pairs.hops + 1):
            here = travelling.arrived()
            if hop < pairs.hops:
                travelling = _Travelling.post(here, self.group, 1)
            yield _source(pairs, hop), here

    def gradients(self, own: Buffer, pairs: Pairs, dtype: torch.dtype, add: AddGradients) -> Buffer:
        arriving = self.keys(own, pairs)
        here = next(arriving)
        sums = _Travelling.from_here(torch.zeros_like(own, dtype=dtype))
        for hop, (source, keys) in enumerate(arriving, 1):
            add(source, keys, sums.arrived)  # which waits for them when their block is computed
            # on to the next rank, which adds its own; from the last one home, past those it came by
            sums = _Travelling.post(sums.arrived(), self.group, 1 if hop < pairs.hops else -pairs.hops)
        add(*here, sums.arrived)  # of this rank's own keys: it never leaves
        return sums.arrived()


@dataclass(frozen=True)
class _Travelling:
    """A buffer on its way here. `sent` is what left for the next rank; it must stay as it is until this has arrived."""

    buffer: Tensor
    sent: Tensor
    works: list[Work]

    @staticmethod
    def from_here(x: Tensor) -> _Travelling:
        return _Travelling(x, x, [])

    @staticmethod
    def post(x: Tensor, group: ProcessGroup, shift: int) -> _Travelling:
        (arriving,), works = start_ring_shift([x], group, shift)
        return _Travelling(arriving, x, works)

    def arrived(self) -> Tensor:
        while self.works:
            self.works.pop().wait()
        return self.buffer


def _source(pairs: Pairs, hop: int) -> int:
    """The rank whose keys are here after so many hops."""
    return (pairs.rank - hop) % len(pairs.blocks)
