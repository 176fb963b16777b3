"""Blockwise attention: this rank's queries against the keys of one rank after another, merged by a running softmax.

Rank r holds the queries and keys of its positions. `kv_transport` yields the keys of each rank that the queries see,
and sums the gradients of keys over ranks; `block_schedule` lists the blocks of queries and keys. This file has the
mathematics, which is the same for every transport.

Each block gives the softmax over its own keys with the logarithm of its sum (lse). Blocks are merged by

    lse = logaddexp_i lse_i,    out = sum_i exp(lse_i - lse) out_i,

and with this global lse and out each block's backward is exact without the other blocks. In
`_BlockwiseAttention.forward` and `backward` one iteration of the loop is one source rank, or one step of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.context_parallel.block_kernels import (
    Heads,
    KVHeads,
    cuda_backward,
    cuda_forward,
    plain_backward,
    plain_forward,
)
from torch_impl.context_parallel.block_schedule import Block, BlockSchedule, Rows, ScatterIndex
from torch_impl.context_parallel.kv_transport import KVBuffer, KVTransport, PendingBuffer
from torch_impl.contract.derivatives import first_derivative_only

KV = Float[Tensor, "2 b hk keys p"]  # K and V
# The only CPU operation that returns the lse, which merging needs; it is not part of torch's public API.
_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class SoftmaxOptions:
    """The scale and softcap that turn scores into logits, and one more logit for each head, its sink."""

    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " h"] | None = None


# Gradient types: V -> V.
def blockwise_attention(
    q: Heads, k: KVHeads, v: KVHeads, schedule: BlockSchedule, transport: KVTransport, options: SoftmaxOptions
) -> Heads:
    """Attention of this rank's queries over the keys of all ranks.

        q "b h s/cp p", k, v "b hk s/cp p"   ->   "b h s/cp p"

    `schedule` has the blocks of visible pairs, and `transport` fetches the keys.

    Cost:   the transport's. Saves q, k and v, the output and one number per query and head.
    """
    return _BlockwiseAttention.apply(with_contiguous_rows(q), k, v, options.sinks, schedule, transport, options)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Heads,
        k: KVHeads,
        v: KVHeads,
        sinks: Tensor | None,
        schedule: BlockSchedule,
        transport: KVTransport,
        options: SoftmaxOptions,
    ) -> Heads:
        # `sinks` is `options.sinks`, passed as an argument so that autograd differentiates it.
        running, local_kv = RunningAttention(q, sinks), buffer_of(k, v)
        # 1. Fetch the keys of one source at a time; a ring sends them on while this rank attends to them.
        for source, kv in transport.fetch(local_kv):
            # 2. Merge each block of them into the running softmax.
            for block in schedule.blocks[source]:
                running.add(q, kv_of(kv), block, options)
        out = running.out.to(q.dtype)
        # 3. Save only this rank's keys: backward fetches the others again.
        ctx.save_for_backward(q, local_kv, out, running.lse, sinks)
        ctx.schedule, ctx.transport, ctx.options = schedule, transport, options
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, cotangent: Heads) -> tuple[Tensor | None, ...]:
        q, local_kv, out, lse, sinks = ctx.saved_tensors
        schedule: BlockSchedule = ctx.schedule
        # dq is summed on this rank. The transport sums the gradient of keys over the ranks.
        dq = zeros_rows_first(q)
        # 1. Fetch the keys of one source at a time, and the buffer for their gradient, which may still be arriving.
        transport = ctx.transport.backward_transport(local_kv, dq.dtype)
        for source, kv, pending_dkv in transport:
            # 2. Add the gradients of each block. In the next iteration a ring sends the buffer on.
            for block in schedule.blocks[source]:
                add_gradients(dq, pending_dkv, cotangent, (q, out, lse), kv_of(kv), block, ctx.options)
        # 3. Take the gradient of this rank's keys, summed over all ranks.
        dkv = transport.local_gradient()
        dsinks = None if sinks is None else _sink_gradient(sinks, lse, out, cotangent)
        return dq.to(q.dtype), *kv_of(dkv).to(local_kv.dtype), dsinks, None, None, None


def _sink_gradient(sinks: Tensor, lse: Tensor, out: Heads, cotangent: Heads) -> Float[Tensor, " h"]:
    """The sinks' gradient from this rank's queries: w * (0 - cotangent . out) for a sink of weight w and value 0."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # Padding has output 0, and its cotangent may be anything, even NaN.
    products = torch.where(out == 0, 0.0, cotangent.to(lse.dtype) * out)
    return -(weights * products.sum(-1)).sum((0, 2)).to(sinks.dtype)


class RunningAttention:
    """The running output and lse of this rank's queries over the keys merged so far, in float32 or wider.

    A sink is the first key of each query, with value 0. Padding rows are in no block: their output stays 0, and their
    lse stays -inf, or the sink. Backward reads this lse for the sinks' gradient only, to which output 0 adds nothing.
    """

    def __init__(self, q: Heads, sinks: Float[Tensor, " h"] | None = None) -> None:
        self.out = zeros_rows_first(q)
        self.lse = self.out.new_full(q.shape[:-1], -torch.inf)
        if sinks is not None:
            self.lse.copy_(sinks[:, None])

    def add(self, q: Heads, kv: KV, block: Block, options: SoftmaxOptions) -> None:
        """Merge the attention of one block into the running result."""
        for kernel_block in _kernel_blocks(block, q):
            self._add_block(q, kv, kernel_block, options)

    def _add_block(self, q: Heads, kv: KV, block: Block, options: SoftmaxOptions) -> None:
        """Merge one kernel call. Its rows are a slice of every batch entry, or m runs that are the kernel's batch."""
        k, v = kv.unbind()
        out, lse = _forward(
            rows_of_block(q, block.queries), rows_of_block(k, block.keys), rows_of_block(v, block.keys), block, options
        )
        if block.fully_masked is not None:  # kernels return different values for a query without a key
            out = out.masked_fill(block.fully_masked.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(block.fully_masked, -torch.inf)
        # A slice of the rows, [b, h, i, p]: merge in place, in a view of the running result.
        if block.query_scatter is None:
            _merge_softmax(self.out[:, :, block.queries], self.lse[:, :, block.queries], out, lse)
            return
        # Runs [m, h, i, p] of a batch of one: flatten to [h, rows, p], without the fill. Indexing by an array copies,
        # so merge in a copy of the running rows and write it back.
        flat_index, rows = block.query_scatter
        out, lse = (x.transpose(0, 1).flatten(1, 2)[:, flat_index] for x in (out, lse))
        running_out, running_lse = self.out[0, :, rows], self.lse[0, :, rows]
        _merge_softmax(running_out, running_lse, out, lse)
        self.out[0, :, rows], self.lse[0, :, rows] = running_out, running_lse


def _merge_softmax(running_out: Tensor, running_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a block's `out` and `lse` into the running output and lse, in place."""
    merged_lse = torch.logaddexp(running_lse, lse)
    # The weights exp(running_lse - merged_lse) and exp(lse - merged_lse) add up to 1: lerp by the second.
    weight = (lse - merged_lse).exp_().nan_to_num_(nan=0.0)  # -inf - -inf is NaN: no key so far
    running_out.lerp_(out.to(running_out.dtype), weight.unsqueeze(-1))
    running_lse.copy_(merged_lse)


def add_gradients(
    dq: Heads,
    pending_dkv: PendingBuffer,
    cotangent: Heads,
    saved: tuple[Tensor, ...],
    kv: KV,
    block: Block,
    options: SoftmaxOptions,
) -> None:
    """Add the gradients of one block to dq, and to the keys' gradient once its buffer has arrived.

    `saved` are the queries, and their output and lse over all blocks.
    """
    (q, out, lse), (k, v) = saved, kv.unbind()
    for kernel_block in _kernel_blocks(block, q):
        # 1. Take the rows of the block. Fill gets an lse of infinity: its weights exp(-inf) = 0 add nothing.
        query_rows = [rows_of_block(x, kernel_block.queries) for x in (cotangent, q, out)]
        lse_rows = rows_of_block(lse.unsqueeze(-1), kernel_block.queries).squeeze(-1)
        if kernel_block.is_query is not None:
            lse_rows = lse_rows.masked_fill(~kernel_block.is_query[:, None], torch.inf)
        gradients = _backward(
            query_rows,
            rows_of_block(k, kernel_block.keys),
            rows_of_block(v, kernel_block.keys),
            lse_rows.contiguous(),
            kernel_block,
            options,
        )
        # 2. Wait for the buffer with earlier ranks' sums only now: it travels while the kernel runs.
        dk, dv = kv_of(pending_dkv.wait()).unbind()
        _add_rows(dq, gradients[0], kernel_block.queries, kernel_block.query_scatter)
        _add_rows(dk, gradients[1], kernel_block.keys, kernel_block.key_scatter)
        _add_rows(dv, gradients[2], kernel_block.keys, kernel_block.key_scatter)


def _add_rows(total: Heads, gradient: Float[Tensor, "m h r p"], rows: Rows, scatter: ScatterIndex | None) -> None:
    """total[rows] += gradient; several runs are flattened and their fill is dropped."""
    if scatter is None:
        total[:, :, rows] += gradient
    else:
        flat_index, flat_rows = scatter
        total[0].index_add_(1, flat_rows, gradient.transpose(0, 1).flatten(1, 2)[:, flat_index].to(total.dtype))


def _kernel_blocks(block: Block, q: Heads) -> tuple[Block, ...]:
    """The blocks of the kernel calls. CUDA's kernels skip the hidden half of a triangle; for the CPU it is split."""
    return (block,) if q.is_cuda else block.triangle_blocks


def buffer_of(k: KVHeads, v: KVHeads) -> KVBuffer:
    """K and V in one buffer, rows first, so that one message carries both and splitting by rows does not copy."""
    return torch.stack([x.permute(2, 0, 1, 3) for x in (k, v)], 1)


def kv_of(buffer: KVBuffer) -> KV:
    """View a buffer as K and V."""
    return buffer.permute(1, 2, 3, 0, 4)


def zeros_rows_first(x: Heads) -> Heads:
    """Zeros in the accumulator's dtype, with a row's heads adjacent in memory, as in the kernels' outputs."""
    h, s, p = x.shape[1:]
    strides = s * h * p, p, h * p, 1
    return torch.empty_strided(x.shape, strides, dtype=accumulator(x.dtype), device=x.device).zero_()


def with_contiguous_rows(q: Heads) -> Heads:
    """Queries with a last dim of stride 1, which the CPU's kernel assumes without checking."""
    return q if q.stride(-1) == 1 else q.contiguous()


def rows_of_block(x: Heads, rows: Rows) -> Float[Tensor, "m h i p"]:
    """The rows of a block: a view of the full batch, or a new batch with one run in each entry."""
    if isinstance(rows, slice):
        return x[:, :, rows]
    return x[0][:, rows].transpose(0, 1)


def _forward(q: Heads, k: KVHeads, v: KVHeads, block: Block, options: SoftmaxOptions) -> tuple[Heads, Tensor]:
    if not k.shape[2]:  # the CPU's kernel would divide by zero, which ends the process
        raise RuntimeError(
            "context_parallel.block_schedule: a block has queries and no keys; leave it out of the schedule"
        )
    scale = options.scale
    if options.softcap is not None:  # no kernel supports a softcap
        return plain_forward(q, k, v, block.mask, block.is_causal, scale, options.softcap)
    if q.is_cuda:
        return cuda_forward(q, k, v, block.mask, block.is_causal, scale)
    return _CPU_FLASH(q, k, v, 0.0, block.is_causal, attn_mask=_additive_mask(block.mask, q), scale=scale)


def _backward(
    query_rows: list[Tensor], k: KVHeads, v: KVHeads, lse: Tensor, block: Block, options: SoftmaxOptions
) -> tuple[Tensor, ...]:
    (cotangent, q, out), scale = query_rows, options.scale
    if options.softcap is not None:
        return plain_backward(cotangent, q, k, v, out, lse, block.mask, block.is_causal, scale, options.softcap)
    if q.is_cuda:
        return cuda_backward(cotangent, q, k, v, out, lse, block.mask, block.is_causal, scale)
    mask = _additive_mask(block.mask, q)
    return _CPU_FLASH_BACKWARD(cotangent, q, k, v, out, lse, 0.0, block.is_causal, attn_mask=mask, scale=scale)


def _additive_mask(mask: Tensor | None, q: Heads) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
