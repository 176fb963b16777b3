"""Attention with the keys of all ranks gathered at once: one message instead of a ring, and shares may be uneven.

Rank r holds the queries and keys of its positions; for the length of a call it holds all keys besides.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import gathered, scattered_sum
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
def gathered_attention(q: Heads, k: KVHeads, v: KVHeads, pairs: Pairs, group: ProcessGroup, scale: float) -> Heads:
    """Attention of this rank's queries to the keys of all ranks.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    Cost:   forward 1 all_gather of K and V; backward the same again and 1 reduce_scatter of their gradients in
            float32 or wider. Saves what the ring does, nothing of whole length.
    """
    return _GatheredAttention.apply(with_whole_rows(q), k, v, pairs, group, scale)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Heads, k: KVHeads, v: KVHeads, pairs: Pairs, group: ProcessGroup, scale: float) -> Heads:
        running = Running(q)
        everyone = gathered(buffer_of(k, v), group, 0, pairs.counts)
        for keys, blocks in zip(everyone.split(pairs.counts), pairs.blocks, strict=True):
            for block in blocks:
                running.add(q, keys_in(keys), block, scale)
        out = running.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, running.lse)
        ctx.pairs, ctx.group, ctx.scale = pairs, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Heads) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pairs, group = ctx.pairs, ctx.group
        dq = row_major_zeros(q)
        everyone = gathered(buffer_of(k, v), group, 0, pairs.counts)
        gradients = torch.zeros_like(everyone, dtype=dq.dtype)
        pieces = everyone.split(pairs.counts), gradients.split(pairs.counts)
        for keys, share, blocks in zip(*pieces, pairs.blocks, strict=True):
            for block in blocks:
                add_gradients(dq, keys_in(share), cotangent, (q, out, lse), keys_in(keys), block, ctx.scale)
        own = scattered_sum(gradients, group, 0, pairs.counts)
        return dq.to(q.dtype), *keys_in(own).to(k.dtype), None, None, None
