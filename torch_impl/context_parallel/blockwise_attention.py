"""Attention over keys that come from other ranks, whichever way they come: the mathematics, beside the exchanges.

Rank r holds the queries and keys of its positions. An exchange hands it the keys of all ranks that it sees, one rank
after another, and brings the gradients of its own keys home.

Attention of one block of queries and keys, and the running result that blocks are merged into.

A block gives its own softmax over its own keys with the logarithm of its sum (lse). Merged,

    lse = logaddexp_i lse_i,    out = sum_i exp(lse_i - lse) out_i,

and with this global lse and out each block's backward is exact by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_impl.collectives import accumulator
from torch_impl.context_parallel.block_kernels import cuda_backward, cuda_forward
from torch_impl.context_parallel.block_schedule import Block, BlockSchedule, Places, Rows
from torch_impl.context_parallel.key_exchange import Buffer, Exchange

Heads = Float[Tensor, "b h s p"]
KVHeads = Float[Tensor, "b hk keys p"]
Keys = Float[Tensor, "2 b hk keys p"]  # K and V
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# V -> V
def blockwise_attention(
    q: Heads, k: KVHeads, v: KVHeads, schedule: BlockSchedule, exchange: Exchange, scale: float
) -> Heads:
    """Attention of this rank's queries to the keys of all ranks.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    `schedule` says which of them a query sees.

    Cost:   what the exchange costs. Saves q, k and v, the output and one number per query and head.
    """
    return _BlockwiseAttention.apply(with_whole_rows(q), k, v, schedule, exchange, scale)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Heads, k: KVHeads, v: KVHeads, schedule: BlockSchedule, exchange: Exchange, scale: float
    ) -> Heads:
        running, own = Running(q), buffer_of(k, v)
        for source, keys in exchange.keys(own, schedule):
            for block in schedule.blocks[source]:
                running.add(q, keys_in(keys), block, scale)
        out = running.out.to(q.dtype)
        ctx.save_for_backward(q, own, out, running.lse)
        ctx.schedule, ctx.exchange, ctx.scale = schedule, exchange, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Heads) -> tuple[Tensor | None, ...]:
        q, own, out, lse = ctx.saved_tensors
        schedule: BlockSchedule = ctx.schedule
        dq = row_major_zeros(q)

        def add(source: int, keys: Buffer, sums: Callable[[], Buffer]) -> None:
            for block in schedule.blocks[source]:
                add_gradients(dq, sums, cotangent, (q, out, lse), keys_in(keys), block, ctx.scale)

        dkeys = ctx.exchange.gradients(own, schedule, dq.dtype, add)
        return dq.to(q.dtype), *keys_in(dkeys).to(own.dtype), None, None, None


class Running:
    """Output and lse of this rank's queries over the keys seen so far, in float32 or wider.

    A row that no block has, which is padding, keeps output 0 and lse -inf; backward never reads it.
    """

    def __init__(self, q: Heads) -> None:
        self.out = row_major_zeros(q)
        self.lse = self.out.new_full(q.shape[:-1], -torch.inf)

    def add(self, q: Heads, keys: Keys, block: Block, scale: float) -> None:
        """Merge one block in."""
        for part in _computed(block, q):
            self._merge(q, keys, part, scale)

    def _merge(self, q: Heads, keys: Keys, block: Block, scale: float) -> None:
        k, v = keys.unbind()
        out, lse = _forward(taken(q, block.queries), taken(k, block.keys), taken(v, block.keys), block, scale)
        if block.blind is not None:  # of a row without a key an op says what it likes
            out = out.masked_fill(block.blind.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(block.blind, -torch.inf)
        if block.query_places is None:
            _merge(self.out[:, :, block.queries], self.lse[:, :, block.queries], out, lse)
            return
        own, rows = block.query_places
        out, lse = (x.transpose(0, 1).flatten(1, 2)[:, own] for x in (out, lse))
        merged, total = self.out[0, :, rows], self.lse[0, :, rows]
        _merge(merged, total, out, lse)
        self.out[0, :, rows], self.lse[0, :, rows] = merged, total


def _merge(merged: Tensor, total: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge `out` and `lse` into the first two."""
    together = torch.logaddexp(total, lse)
    weight = (lse - together).exp_().nan_to_num_(nan=0.0)  # -inf less -inf: no key so far
    merged.lerp_(out.to(merged.dtype), weight.unsqueeze(-1))
    total.copy_(together)


def add_gradients(
    dq: Heads,
    dkeys: Callable[[], Buffer],
    cotangent: Heads,
    saved: tuple[Tensor, ...],
    keys: Keys,
    block: Block,
    scale: float,
) -> None:
    """Add one block's share to the gradients. `saved` are the queries with their global output and lse.

    `dkeys` gives the sums that gradients of keys are added to; it is asked when there is something to add.
    """
    (q, out, lse), (k, v) = saved, keys.unbind()
    for part in _computed(block, q):
        given = [taken(x, part.queries) for x in (cotangent, q, out)]
        own_lse = taken(lse.unsqueeze(-1), part.queries).squeeze(-1)
        if part.is_query is not None:
            own_lse = own_lse.masked_fill(~part.is_query[:, None], torch.inf)
        shares = _backward(given, taken(k, part.keys), taken(v, part.keys), own_lse.contiguous(), part, scale)
        dk, dv = keys_in(dkeys()).unbind()
        _add(dq, shares[0], part.queries, part.query_places)
        _add(dk, shares[1], part.keys, part.key_places)
        _add(dv, shares[2], part.keys, part.key_places)


def _add(total: Heads, share: Float[Tensor, "c h r p"], rows: Rows, places: Places | None) -> None:
    if places is None:
        total[:, :, rows] += share
    else:
        own, at = places
        total[0].index_add_(1, at, share.transpose(0, 1).flatten(1, 2)[:, own].to(total.dtype))


def _computed(block: Block, q: Heads) -> tuple[Block, ...]:
    """What the kernel is called for: on CUDA it leaves out by itself what a triangle hides."""
    return (block,) if q.is_cuda else block.finer


def buffer_of(k: KVHeads, v: KVHeads) -> Buffer:
    """K and V in one piece that travels, cut by rows without a copy."""
    return torch.stack([x.permute(2, 0, 1, 3) for x in (k, v)], 1)


def keys_in(buffer: Buffer) -> Keys:
    """K and V of a buffer, as a view."""
    return buffer.permute(1, 2, 3, 0, 4)


def row_major_zeros(x: Heads) -> Heads:
    """Zeros in the accumulator's dtype, the heads of a row side by side as the ops return theirs; a view of nothing."""
    h, s, p = x.shape[1:]
    strides = s * h * p, p, h * p, 1
    return torch.empty_strided(x.shape, strides, dtype=accumulator(x.dtype), device=x.device).zero_()


def with_whole_rows(q: Heads) -> Heads:
    """Queries whose numbers of a head stand side by side: the CPU's op reads them so, whatever the strides say."""
    return q if q.stride(-1) == 1 else q.contiguous()


def taken(x: Heads, rows: Rows) -> Float[Tensor, "m h i p"]:
    """The rows of a block: a view of all of the batch, or a run in each entry of a new batch."""
    if isinstance(rows, slice):
        return x[:, :, rows]
    return x[0][:, rows].transpose(0, 1)


def _forward(q: Heads, k: KVHeads, v: KVHeads, block: Block, scale: float) -> tuple[Heads, Tensor]:
    if not k.shape[2]:  # the CPU's op would divide by it and end the process
        raise RuntimeError("context_parallel.blocks: a block has queries and no keys; leave it out of the schedule")
    if q.is_cuda:
        return cuda_forward(q, k, v, block.mask, block.is_causal, scale)
    return _CPU(q, k, v, 0.0, block.is_causal, attn_mask=_additive(block.mask, q), scale=scale)


def _backward(
    given: list[Tensor], k: KVHeads, v: KVHeads, lse: Tensor, block: Block, scale: float
) -> tuple[Tensor, ...]:
    cotangent, q, out = given
    if q.is_cuda:
        return cuda_backward(cotangent, q, k, v, out, lse, block.mask, block.is_causal, scale)
    mask = _additive(block.mask, q)
    return _CPU_BACKWARD(cotangent, q, k, v, out, lse, 0.0, block.is_causal, attn_mask=mask, scale=scale)


def _additive(mask: Tensor | None, q: Heads) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
