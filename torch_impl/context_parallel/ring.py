"""Attention with keys that travel around a ring, or along a window; without a ring, attention of one rank's own keys.

Rank r holds the queries and keys of its positions. K and V go from rank to rank in one buffer; the gradients of keys
follow them in float32 or wider, always after the block that adds to them, and in the end go home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, Work

from torch_impl.collectives import start_ring_shift
from torch_impl.context_parallel.blocks import (
    Running,
    add_gradients,
    buffer_of,
    keys_in,
    row_major_zeros,
    with_whole_rows,
)
from torch_impl.context_parallel.pairs import Pairs

Heads = Float[Tensor, "b h s p"]
KVHeads = Float[Tensor, "b hk s p"]


# V -> V
def ring_attention(q: Heads, k: KVHeads, v: KVHeads, pairs: Pairs, group: ProcessGroup, scale: float) -> Heads:
    """Attention of this rank's queries to the keys of all ranks of the ring.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    `pairs` says which of them a query sees and how far keys travel; without a hop `group` is never spoken to.

    Cost:   forward `hops` shifts of K and V together; backward as many of K and V, and of their gradients in
            float32 or wider. Saves q, k, v, the output and one number per query and head.
    """
    return _RingAttention.apply(with_whole_rows(q), k, v, pairs, group, scale)


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
        for work in self.works:
            work.wait()
        return self.buffer


def _source(pairs: Pairs, hop: int) -> int:
    """The rank whose keys are here after so many hops."""
    return (pairs.rank - hop) % len(pairs.blocks)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Heads, k: KVHeads, v: KVHeads, pairs: Pairs, group: ProcessGroup, scale: float) -> Heads:
        running = Running(q)
        travelling = _Travelling.from_here(buffer_of(k, v))
        for hop in range(pairs.hops + 1):
            here = travelling.arrived()
            if hop < pairs.hops:
                travelling = _Travelling.post(here, group, 1)
            for block in pairs.blocks[_source(pairs, hop)]:
                running.add(q, keys_in(here), block, scale)
        out = running.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, running.lse)
        ctx.pairs, ctx.group, ctx.scale = pairs, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Heads) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pairs, group, hops = ctx.pairs, ctx.group, ctx.pairs.hops
        dq = row_major_zeros(q)
        travelling = _Travelling.from_here(buffer_of(k, v))
        home = torch.zeros_like(travelling.buffer, dtype=dq.dtype)  # of this rank's own keys: it never leaves
        gradients = None
        for hop in range(hops + 1):
            here = travelling.arrived()
            if hop < hops:
                travelling = _Travelling.post(here, group, 1)
            share = home if hop == 0 else torch.zeros_like(home)
            for block in pairs.blocks[_source(pairs, hop)]:
                add_gradients(dq, keys_in(share), cotangent, (q, out, lse), keys_in(here), block, ctx.scale)
            if gradients is not None:
                share += gradients.arrived()
            if hop > 0:  # on to the next rank, which adds its own; from the last one home, past those it came by
                gradients = _Travelling.post(share, group, 1 if hop < hops else -hops)
        if gradients is not None:
            home += gradients.arrived()
        return dq.to(q.dtype), *keys_in(home).to(k.dtype), None, None, None
