"""Attention over keys that come from other ranks, whichever way they come: the mathematics, beside the exchanges.

Rank r holds the queries and keys of its positions. An exchange hands it the keys of all ranks that it sees, one rank
after another, and brings the gradients of its own keys home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_impl.context_parallel.blocks import (
    Buffer,
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
# The rank whose keys these are, the keys, and what gives the sums that their gradients are added to.
AddGradients = Callable[[int, Buffer, Callable[[], Buffer]], None]


@runtime_checkable  # so that annotations can be held to it
class Exchange(Protocol):
    """How keys come from all ranks and their gradients go back. K and V are one buffer, gradients float32 or wider."""

    def keys(self, own: Buffer, pairs: Pairs) -> Iterator[tuple[int, Buffer]]:
        """Every rank whose keys are seen, and its keys."""
        ...

    def gradients(self, own: Buffer, pairs: Pairs, dtype: torch.dtype, add: AddGradients) -> Buffer:
        """The gradients of this rank's own keys, from `add` for each rank whose keys are seen, here and elsewhere."""
        ...


# V -> V
def exchanged_attention(q: Heads, k: KVHeads, v: KVHeads, pairs: Pairs, exchange: Exchange, scale: float) -> Heads:
    """Attention of this rank's queries to the keys of all ranks.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    `pairs` says which of them a query sees.

    Cost:   what the exchange costs. Saves q, k and v, the output and one number per query and head.
    """
    return _ExchangedAttention.apply(with_whole_rows(q), k, v, pairs, exchange, scale)


class _ExchangedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Heads, k: KVHeads, v: KVHeads, pairs: Pairs, exchange: Exchange, scale: float) -> Heads:
        running, own = Running(q), buffer_of(k, v)
        for source, keys in exchange.keys(own, pairs):
            for block in pairs.blocks[source]:
                running.add(q, keys_in(keys), block, scale)
        out = running.out.to(q.dtype)
        ctx.save_for_backward(q, own, out, running.lse)
        ctx.pairs, ctx.exchange, ctx.scale = pairs, exchange, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Heads) -> tuple[Tensor | None, ...]:
        q, own, out, lse = ctx.saved_tensors
        pairs: Pairs = ctx.pairs
        dq = row_major_zeros(q)

        def add(source: int, keys: Buffer, sums: Callable[[], Buffer]) -> None:
            for block in pairs.blocks[source]:
                add_gradients(dq, sums, cotangent, (q, out, lse), keys_in(keys), block, ctx.scale)

        dkeys = ctx.exchange.gradients(own, pairs, dq.dtype, add)
        return dq.to(q.dtype), *keys_in(dkeys).to(own.dtype), None, None, None
