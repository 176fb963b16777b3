"""Blockwise attention: this rank's queries against the keys of one rank after another, merged by a running softmax.

Rank r holds the queries and keys of its positions. An exchange (`key_exchange`) yields the keys of each rank that the
queries see, and returns the gradients of this rank's keys. The mathematics is here, whichever way the keys travel.

Each block gives the softmax over its own keys with the logarithm of its sum (lse). Blocks are merged by

    lse = logaddexp_i lse_i,    out = sum_i exp(lse_i - lse) out_i,

and with this global lse and out each block's backward is exact without the other blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.context_parallel.block_kernels import cuda_backward, cuda_forward
from torch_impl.context_parallel.block_schedule import Block, BlockSchedule, Places, Rows
from torch_impl.context_parallel.key_exchange import KVBuffer, KVExchange
from torch_impl.contract.derivatives import first_derivative_only

Heads = Float[Tensor, "b h s p"]
KVHeads = Float[Tensor, "b hk keys p"]
KV = Float[Tensor, "2 b hk keys p"]  # K and V
# The only operation on the CPU that returns the lse, which merging needs; it is not part of torch's public API.
_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# V -> V
def blockwise_attention(
    q: Heads, k: KVHeads, v: KVHeads, schedule: BlockSchedule, exchange: KVExchange, scale: float
) -> Heads:
    """Attention of this rank's queries over the keys of all ranks.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    `schedule` says which keys a query sees, `exchange` how they travel.

    Cost:   that of the exchange. Saves q, k and v, the output and one number per query and head.
    """
    return _BlockwiseAttention.apply(with_contiguous_rows(q), k, v, schedule, exchange, scale)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Heads, k: KVHeads, v: KVHeads, schedule: BlockSchedule, exchange: KVExchange, scale: float
    ) -> Heads:
        # 1. Merge block after block while the keys come in from each source rank.
        running, local_kv = RunningAttention(q), buffer_of(k, v)
        for source, kv in exchange.fetch(local_kv, schedule):
            for block in schedule.blocks[source]:
                running.add(q, kv_of(kv), block, scale)
        out = running.out.to(q.dtype)
        # 2. Save this rank's keys alone: backward fetches the others again.
        ctx.save_for_backward(q, local_kv, out, running.lse)
        ctx.schedule, ctx.exchange, ctx.scale = schedule, exchange, scale
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Heads) -> tuple[Tensor | None, ...]:
        q, local_kv, out, lse = ctx.saved_tensors
        schedule: BlockSchedule = ctx.schedule
        # dq is summed here. The gradients of keys are summed in buffers that the exchange moves.
        dq = zeros_rows_first(q)

        def add(source: int, kv: KVBuffer, wait_for_dkv: Callable[[], KVBuffer]) -> None:
            for block in schedule.blocks[source]:
                add_gradients(dq, wait_for_dkv, cotangent, (q, out, lse), kv_of(kv), block, ctx.scale)

        dkv = ctx.exchange.reduce_gradients(local_kv, schedule, dq.dtype, add)
        return dq.to(q.dtype), *kv_of(dkv).to(local_kv.dtype), None, None, None


class RunningAttention:
    """The running result: output and lse of this rank's queries over the keys seen so far, in float32 or wider.

    A row of padding is in no block: it keeps output 0 and lse -inf, and backward never reads it.
    """

    def __init__(self, q: Heads) -> None:
        self.out = zeros_rows_first(q)
        self.lse = self.out.new_full(q.shape[:-1], -torch.inf)

    def add(self, q: Heads, kv: KV, block: Block, scale: float) -> None:
        """Merge the attention of one block into the running result."""
        for part in _kernel_blocks(block, q):
            self._add_block(q, kv, part, scale)

    def _add_block(self, q: Heads, kv: KV, block: Block, scale: float) -> None:
        k, v = kv.unbind()
        out, lse = _forward(
            rows_of_block(q, block.queries), rows_of_block(k, block.keys), rows_of_block(v, block.keys), block, scale
        )
        if block.fully_masked is not None:  # kernels differ in what they return for a query without a key
            out = out.masked_fill(block.fully_masked.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(block.fully_masked, -torch.inf)
        if block.query_places is None:
            _merge_softmax(self.out[:, :, block.queries], self.lse[:, :, block.queries], out, lse)
            return
        # Runs in a batch of one: flatten them, drop the fill, and write back, since indexing by an array is a copy.
        present, rows = block.query_places
        out, lse = (x.transpose(0, 1).flatten(1, 2)[:, present] for x in (out, lse))
        running_out, running_lse = self.out[0, :, rows], self.lse[0, :, rows]
        _merge_softmax(running_out, running_lse, out, lse)
        self.out[0, :, rows], self.lse[0, :, rows] = running_out, running_lse


def _merge_softmax(running_out: Tensor, running_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge `out` and `lse` of a block into the running output and its lse, in place."""
    merged_lse = torch.logaddexp(running_lse, lse)
    # The weights exp(running_lse - merged_lse) and exp(lse - merged_lse) add up to 1: a lerp by the second.
    weight = (lse - merged_lse).exp_().nan_to_num_(nan=0.0)  # -inf - -inf is NaN: no key so far
    running_out.lerp_(out.to(running_out.dtype), weight.unsqueeze(-1))
    running_lse.copy_(merged_lse)


def add_gradients(
    dq: Heads,
    wait_for_dkv: Callable[[], KVBuffer],
    cotangent: Heads,
    saved: tuple[Tensor, ...],
    kv: KV,
    block: Block,
    scale: float,
) -> None:
    """Add one block's part of the gradients. `saved` are the queries with their output and lse over all blocks.

    `wait_for_dkv` returns the sums that gradients of keys are added to, once they have been received.
    """
    (q, out, lse), (k, v) = saved, kv.unbind()
    for part in _kernel_blocks(block, q):
        # 1. The rows of the block. Fill gets an lse of infinity: its weights are exp(-inf) = 0, and it adds nothing.
        query_rows = [rows_of_block(x, part.queries) for x in (cotangent, q, out)]
        lse_rows = rows_of_block(lse.unsqueeze(-1), part.queries).squeeze(-1)
        if part.is_query is not None:
            lse_rows = lse_rows.masked_fill(~part.is_query[:, None], torch.inf)
        gradients = _backward(
            query_rows, rows_of_block(k, part.keys), rows_of_block(v, part.keys), lse_rows.contiguous(), part, scale
        )
        # 2. Only now wait for the sums of other ranks, which were sent while the kernel ran.
        dk, dv = kv_of(wait_for_dkv()).unbind()
        _add_rows(dq, gradients[0], part.queries, part.query_places)
        _add_rows(dk, gradients[1], part.keys, part.key_places)
        _add_rows(dv, gradients[2], part.keys, part.key_places)


def _add_rows(total: Heads, share: Float[Tensor, "c h r p"], rows: Rows, places: Places | None) -> None:
    if places is None:
        total[:, :, rows] += share
    else:
        present, targets = places
        total[0].index_add_(1, targets, share.transpose(0, 1).flatten(1, 2)[:, present].to(total.dtype))


def _kernel_blocks(block: Block, q: Heads) -> tuple[Block, ...]:
    """The blocks that kernels are called with: CUDA's skip the hidden half of a triangle; for the CPU's it is split."""
    return (block,) if q.is_cuda else block.triangle_parts


def buffer_of(k: KVHeads, v: KVHeads) -> KVBuffer:
    """K and V in one buffer, rows first, so that one message carries both and rows are split without a copy."""
    return torch.stack([x.permute(2, 0, 1, 3) for x in (k, v)], 1)


def kv_of(buffer: KVBuffer) -> KV:
    """K and V of a buffer, as a view."""
    return buffer.permute(1, 2, 3, 0, 4)


def zeros_rows_first(x: Heads) -> Heads:
    """Zeros in the accumulator's dtype, with the heads of a row adjacent in memory as in the outputs of the kernels."""
    h, s, p = x.shape[1:]
    strides = s * h * p, p, h * p, 1
    return torch.empty_strided(x.shape, strides, dtype=accumulator(x.dtype), device=x.device).zero_()


def with_contiguous_rows(q: Heads) -> Heads:
    """Queries with a last dim of stride 1: the CPU's kernel assumes it, whatever the strides say."""
    return q if q.stride(-1) == 1 else q.contiguous()


def rows_of_block(x: Heads, rows: Rows) -> Float[Tensor, "m h i p"]:
    """The rows of a block: a view of the full batch, or a new batch with one run in each entry."""
    if isinstance(rows, slice):
        return x[:, :, rows]
    return x[0][:, rows].transpose(0, 1)


def _forward(q: Heads, k: KVHeads, v: KVHeads, block: Block, scale: float) -> tuple[Heads, Tensor]:
    if not k.shape[2]:  # the CPU's kernel would divide by zero, which ends the process
        raise RuntimeError("context_parallel.blocks: a block has queries and no keys; leave it out of the schedule")
    if q.is_cuda:
        return cuda_forward(q, k, v, block.mask, block.is_causal, scale)
    return _CPU_FLASH(q, k, v, 0.0, block.is_causal, attn_mask=_additive(block.mask, q), scale=scale)


def _backward(
    query_side: list[Tensor], k: KVHeads, v: KVHeads, lse: Tensor, block: Block, scale: float
) -> tuple[Tensor, ...]:
    cotangent, q, out = query_side
    if q.is_cuda:
        return cuda_backward(cotangent, q, k, v, out, lse, block.mask, block.is_causal, scale)
    mask = _additive(block.mask, q)
    return _CPU_FLASH_BACKWARD(cotangent, q, k, v, out, lse, 0.0, block.is_causal, attn_mask=mask, scale=scale)


def _additive(mask: Tensor | None, q: Heads) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
