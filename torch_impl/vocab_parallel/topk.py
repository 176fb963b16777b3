"""The k largest logits of a sharded vocabulary, and the logits at given ids.

Rank r of tp has columns [vocab_start_index, vocab_end_index) of its tokens' logits. Shards are in rank order; they may
differ in width and be empty. The gradient of logits at given ids is zero elsewhere, so only the ids' columns are saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, large_tensors
from torch_impl.collectives.plain import all_gather_stack, all_reduce_sum
from torch_impl.collectives.reductions import as_replicated
from torch_impl.contract import Group, NonNegativeInt, Rejected, Sharded, ShardedIds, contract
from torch_impl.vocab_parallel.sequence_gather import GatherOverCp, cp_shard, rank_and_size, why_not_covered
from torch_impl.vocab_parallel.statistics import index_of, local_column, row_blocks, rows_per_block
from torch_impl.vocab_parallel.vocab_range import IGNORED_ID, ChunkSize, VocabEnd, VocabStart

NO_CANDIDATE = -1  # the id in an unused slot, if a rank has fewer than k columns
MERGED_BYTES = 1 << 22  # bytes of candidates that are sorted at a time


@torch.no_grad()
@contract
def distributed_vocab_topk(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
    k: NonNegativeInt,
    tp_group: Group[ProcessGroup, "tp"],
    *,
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    chunk_size: ChunkSize | None = None,
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"]]:
    """(values, ids) of each token's k largest logits, descending; of equal logits the lowest id first.

    The result has min(k, v) entries per token and no gradient. Values are float32 (float64 for float64 logits).
    Columns of `vocab_parallel_logits` past this rank's range are not candidates. Masked columns (-inf) come last; NaN
    counts as +inf. Neither tp nor `chunk_size` changes the result.

    Cost:   1 all_gather of k pairs (value, id) per token, 8 bytes each (float64: 16), and one number. A host read if k
            exceeds this rank's range. Memory: one row block, tp*k pairs per token.
    Errors: TypeError if tp_group is not a ProcessGroup, or the logits are not floating; ValueError if k is
            negative, the range does not fit the shard, or chunk_size is below 1.
    """
    logits = vocab_parallel_logits
    # 1. This rank's k largest, padded if its range is narrower.
    n, width = logits.shape[:-1].numel(), vocab_end_index - vocab_start_index
    values = torch.zeros(n, k, dtype=accumulator(logits.dtype), device=logits.device)
    ids = torch.full((n, k), NO_CANDIDATE, device=logits.device)
    count = min(k, width)
    for row_slice, block in row_blocks(logits, rows_per_block(logits, chunk_size)):
        columns = _largest_columns(block[:, :width], count)
        values[row_slice, :count] = block.gather(-1, columns).to(values.dtype)
        ids[row_slice, :count] = columns + vocab_start_index
    # 2. The k largest among all ranks' candidates; k is at most the size of the vocabulary.
    values_of, ids_of, sizes = _candidates_of_all(values, ids, width, tp_group)
    k = k if k <= width else min(k, int(sizes.sum()))
    values, ids = _largest_of_all(values_of, ids_of, k)
    return values.view(*logits.shape[:-1], k), ids.view(*logits.shape[:-1], k)


@contract
def gather_logits_at_global_indices(
    vocab_parallel_logits: Sharded[Tensor, "b l/cp:dual_chunk_swap v/tp"],
    global_indices: ShardedIds[Tensor, "b s k"],
    tp_group: Group[ProcessGroup, "tp"] | None = None,
    cp_group: Group[ProcessGroup, "cp"] | None = None,
    *,
    vocab_start_index: VocabStart,
    vocab_end_index: VocabEnd,
    chunk_size: ChunkSize | None = None,
) -> Sharded[Tensor, "b s k tp=I cp=R"]:
    """The logits at k ids of each position of the full sequence.

    out[..., j] = vocab_parallel_logits[..., global_indices[..., j]];   0.0 without gradient outside the vocabulary

    `tp_group=None` is for a full vocabulary, `cp_group=None` for a full sequence. The l = s/cp positions of the logits
    on each rank are in DualChunkSwap order; they may cover more than the ids' s (padding). Results are float32 (float64
    for float64 logits); the gradient has the logits' dtype, and duplicates add up in it. `chunk_size` (b * chunk_size
    rows per block; None: automatic) bounds the working set of backward; forward reads only the logits at the ids.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp or
    use each score in the loss of one rank alone.

    Cost:   forward 1 all_reduce of k * b*s/cp numbers over tp, 1 all_gather of as many over cp; backward none over
            tp, 1 reduce_scatter of k * b*s numbers over cp. Saves 4 bytes for each id of this rank's positions.
    Errors: TypeError for a group that is not a ProcessGroup, ids that are not int32 or int64, logits not floating;
            ValueError if shapes disagree, the ids cover more positions than the logits, s cannot be sharded over cp, or
            the range or chunk_size do not fit.
    """
    logits, local, cp = vocab_parallel_logits, vocab_parallel_logits.shape[1], rank_and_size(cp_group)[1]
    reason = why_not_covered("global_indices", global_indices.shape[1], "vocab_parallel_logits", local, cp)
    if reason:
        raise Rejected(reason)
    ids = local_ids(global_indices.to(logits.device), local, cp_group)
    z = LogitsAt.apply(logits, ids, vocab_start_index, vocab_end_index, tp_group, chunk_size)
    if cp_group is not None:
        z = GatherOverCp.apply(z, cp_group, 1)
    return z[:, : global_indices.shape[1]]


def _largest_columns(block: Float[Tensor, "n v"], k: int) -> Int64[Tensor, "n k"]:
    """Columns of the k <= v largest logits; of equal logits the lowest column first, where torch.topk takes any."""
    if k == 0:
        return torch.empty(len(block), 0, dtype=torch.int64, device=block.device)
    z, width = torch.where(block.isnan(), math.inf, block), block.shape[-1]
    smallest = z.topk(k).values[:, -1:]
    # Score the columns that exceed the k-th largest above the columns that equal it, lower columns higher: no ties.
    score = torch.where(z >= smallest, torch.arange(width, 0, -1, dtype=torch.int32, device=z.device), 0)
    score.add_(z > smallest, alpha=width)
    return score.topk(k).indices


def _candidates_of_all(
    values: Float[Tensor, "n k"], ids: Int64[Tensor, "n k"], width: int, group: ProcessGroup
) -> tuple[Float[Tensor, "n r k"], Int64[Tensor, "n r k"], Int[Tensor, " r"]]:
    """Values, ids and widths of all ranks. One all_gather: values are sent as integers with the same bits."""
    bits = torch.int32 if values.itemsize == 4 else torch.int64
    size = torch.tensor([width], dtype=bits, device=values.device)
    messages = all_gather_stack(torch.cat([values.view(bits).flatten(), ids.to(bits).flatten(), size]), group)
    pairs = messages[:, :-1].view(len(messages), 2, *values.shape).movedim(0, 2)
    return pairs[0].view(values.dtype), pairs[1].long(), messages[:, -1]


def _largest_of_all(
    values: Float[Tensor, "n r k"], ids: Int64[Tensor, "n r k"], k: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    """The k largest of all ranks' candidates, descending; a stable sort keeps equal values in id order."""
    rows = max(1, MERGED_BYTES // max(1, values[:1].nbytes))
    parts = [_sort(v.flatten(1), i.flatten(1), k) for v, i in zip(values.split(rows), ids.split(rows), strict=True)]
    return torch.cat([v for v, _ in parts]), torch.cat([i for _, i in parts])


def _sort(
    values: Float[Tensor, "n c"], ids: Int64[Tensor, "n c"], k: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    largest_first = -torch.where(values.isnan(), math.inf, values)
    # Unused slots get NaN, which sorts after everything, including a real -inf.
    key = torch.where(ids == NO_CANDIDATE, math.nan, largest_first)
    order = key.sort(dim=-1, stable=True).indices[:, :k]
    return values.gather(-1, order), ids.gather(-1, order)


class LogitsAt(torch.autograd.Function):
    """z[idx_j], 0 outside the vocabulary: "*a v/tp", "*a k" -> "*a k tp=I". `group` None is for full rows.

    Forward 1 all_reduce of k numbers per row, backward none. Saves 4 bytes per id.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "*a v"],
        ids: Int[Tensor, "*a k"],
        start: int,
        end: int,
        group: ProcessGroup | None,
        chunk_size: int | None,
    ) -> Float[Tensor, "*a k"]:
        column = local_column(ids, start, end)
        ctx.like, ctx.chunk_size, ctx.group = (logits.shape, logits.dtype), chunk_size, group
        ctx.save_for_backward(column)
        z = torch.zeros(column.shape, dtype=accumulator(logits.dtype), device=logits.device)
        if logits.shape[-1]:
            looked_up = logits.gather(-1, index_of(column))
            z = torch.where(column >= 0, looked_up.to(z.dtype), z)
        return z if group is None else all_reduce_sum(z, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (column,), (shape, dtype) = ctx.saved_tensors, ctx.like
        if cotangent.requires_grad:  # use operations that can be differentiated again
            return _put_at(cotangent, column, shape, dtype, ctx.group), None, None, None, None, None
        rows = column.shape[:-1].numel(), column.shape[-1]
        g = torch.where(column >= 0, cotangent, 0.0).reshape(rows)
        index = index_of(column).reshape(rows)
        gradient = large_tensors.empty(shape, dtype, cotangent.device)
        for row_slice, block in row_blocks(gradient, rows_per_block(gradient, ctx.chunk_size)):
            if block.shape[-1]:
                total = torch.zeros(block.shape, dtype=g.dtype, device=g.device)
                block.copy_(total.scatter_add_(-1, index[row_slice], g[row_slice]))
        return gradient, None, None, None, None, None


def _put_at(
    cotangent: Float[Tensor, "*a k"],
    column: Int[Tensor, "*a k"],
    shape: torch.Size,
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> Float[Tensor, "*a v"]:
    """The gradient of looked-up logits, differentiable in the cotangent, which is equal on all ranks of the group."""
    g = torch.where(column >= 0, cotangent if group is None else as_replicated(cotangent, group), 0.0)
    # An empty shard has no column to add to, but its rank must take part in the backward of `as_replicated`, so its
    # gradient is a slice of a tensor with one column.
    wide = g.new_zeros(*shape[:-1], max(1, shape[-1])).scatter_add(-1, index_of(column), g)
    return wide[..., : shape[-1]].to(dtype)


def local_ids(
    ids: Int[Tensor, "b s k"], local: int, cp_group: ProcessGroup | None, positions: int | None = None
) -> Int[Tensor, "b l k"]:
    """The ids at this cp rank's `local` positions; IGNORED_ID past the first `positions` (None: all)."""
    rank, cp = rank_and_size(cp_group)
    ids = ids[:, : ids.shape[1] if positions is None else positions]
    return cp_shard(F.pad(ids, (0, 0, 0, local * cp - ids.shape[1]), value=IGNORED_ID), rank, cp)
