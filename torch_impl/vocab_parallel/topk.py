"""The k largest logits of a vocabulary that is cut over the ranks, and logits at given ids.

Rank r of tp holds columns [vocab_start_index, vocab_end_index) of the logits of each of its tokens. Shards are in
rank order; they may differ in width and be empty.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import gathered, summed
from torch_impl.vocab_parallel import arguments as a
from torch_impl.vocab_parallel.sequence_gather import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    check_cut_over_cp,
    checked_cp_group,
)
from torch_impl.vocab_parallel.statistics import block_rows, local_column, row_blocks
from torch_impl.vocab_parallel.vocab_range import NO_ID

LOGITS = "vocab_parallel_logits"

NO_CANDIDATE = -1  # in place of an id: the rank has fewer columns than k

MERGED_BYTES = 1 << 22  # of candidates that are sorted at a time


class LogitsAt(torch.autograd.Function):
    """z[idx_j], 0 where nobody owns the id: "*a v/tp", "*a k" -> "*a k tp=I". `group` None is for whole rows.

    Forward 1 all_reduce of the k numbers of each row, backward none. Saves 4 bytes of each id.
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
        ctx.like, ctx.chunk_size = (logits.shape, logits.dtype), chunk_size
        ctx.save_for_backward(column)
        found = torch.zeros(column.shape, dtype=accumulator(logits.dtype), device=logits.device)
        if logits.shape[-1]:
            looked_up = logits.gather(-1, column.clamp_min(0).long())
            found = torch.where(column >= 0, looked_up.to(found.dtype), found)
        return found if group is None else summed(found, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (column,), (shape, dtype) = ctx.saved_tensors, ctx.like
        rows = column.shape[:-1].numel(), column.shape[-1]
        g = torch.where(column >= 0, cotangent, 0.0).reshape(rows)
        here = column.clamp_min(0).long().reshape(rows)
        gradient = torch.empty(shape, dtype=dtype, device=cotangent.device)
        for part, block in row_blocks(gradient, block_rows(gradient, ctx.chunk_size)):
            if block.shape[-1]:
                added = torch.zeros(block.shape, dtype=g.dtype, device=g.device).scatter_add_(-1, here[part], g[part])
                block.copy_(added)
        return gradient, None, None, None, None, None


def check_positions(
    function: str, ids_name: str, ids: Tensor, logits_name: str, logits: Tensor, cp_group: ProcessGroup | None
) -> int:
    """The number of cp ranks, whose logits cover the positions of ids [b, s, k] and can be cut."""
    cp = 1 if cp_group is None else checked_cp_group(function, cp_group).size()
    if logits.ndim != 3 or ids.ndim != 3 or len(ids) != len(logits):
        raise ValueError(
            f"{function}: {ids_name} is {list(ids.shape)} but {logits_name} is {list(logits.shape)}; "
            "they must be [b, s, k] and [b, s, v]"
        )
    local = logits.shape[1]
    if ids.shape[1] > local * cp:
        per_rank = f" ({local} per rank, cp={cp})" if cp > 1 else ""
        raise ValueError(
            f"{function}: {ids_name} has {ids.shape[1]} positions but {logits_name} covers {local * cp}{per_rank}"
        )
    check_cut_over_cp(function, local * cp, cp)
    return cp


def ids_held(
    ids: Int[Tensor, "b s k"], local: int, cp_group: ProcessGroup | None, positions: int | None = None
) -> Int[Tensor, "b l k"]:
    """The ids at this cp rank's `local` positions; nobody's at positions past the first `positions` (None: all)."""
    cp, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    asked = ids[:, : ids.shape[1] if positions is None else positions]
    padded = F.pad(asked, (0, 0, 0, local * cp - asked.shape[1]), value=NO_ID)
    return _get_tokens_on_this_cp_rank(padded, rank, cp)


@torch.no_grad()
def distributed_vocab_topk(
    vocab_parallel_logits: Float[Tensor, "*a v"],
    k: int,
    tp_group: ProcessGroup,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "*a k"], Int64[Tensor, "*a k"]]:
    """The k largest logits of each token, descending, and their ids; of equal ones the lowest id first.

        vocab_parallel_logits  "b s v/tp"   ->   "b s k", "b s k" (no gradient),   k = min(k, v)

    Values are float32, for float64 logits float64. Columns past this rank's range are no candidates; masked ones
    (-inf) are, after all others; NaN counts as +inf. Neither tp nor `chunk_size` changes the result.

    Cost:   1 all_gather of k pairs (value, id) per token, 8 bytes each (float64: 16), and one number more. A
            host read where k exceeds this rank's range. Memory: one row block, tp*k pairs per token.
    Errors: TypeError if tp_group is None or no ProcessGroup, or the logits are not floating; ValueError if k is
            negative, the range does not fit the shard, or chunk_size is below 1.
    """
    function, logits = "vocab_parallel.distributed_vocab_topk", vocab_parallel_logits
    a.checked_tp_group(function, "tp_group", tp_group)
    a.check_logits(function, LOGITS, logits)
    a.check_range(function, vocab_start_index, vocab_end_index, LOGITS, logits)
    a.check_chunk_size(function, chunk_size)
    if k < 0:
        raise ValueError(f"{function}: k={k} must not be negative")
    n, width = logits.shape[:-1].numel(), vocab_end_index - vocab_start_index
    values = torch.zeros(n, k, dtype=accumulator(logits.dtype), device=logits.device)
    ids = torch.full((n, k), NO_CANDIDATE, device=logits.device)
    owned = min(k, width)
    for part, block in row_blocks(logits, block_rows(logits, chunk_size)):
        columns = _largest_columns(block[:, :width], owned)
        values[part, :owned] = block.gather(-1, columns).to(values.dtype)
        ids[part, :owned] = columns + vocab_start_index
    values_of, ids_of, sizes = _exchanged(values, ids, width, tp_group)
    found = k if k <= width else min(k, int(sizes.sum()))
    values, ids = _merged(values_of, ids_of, found)
    return values.view(*logits.shape[:-1], found), ids.view(*logits.shape[:-1], found)


def gather_logits_at_global_indices(
    vocab_parallel_logits: Float[Tensor, "b l v"],
    global_indices: Int[Tensor, "b s k"],
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Float[Tensor, "b s k"]:
    """The logits at k ids of each position of the whole sequence.

        vocab_parallel_logits  "b s/cp:dual_chunk_swap v/tp"     global_indices  "b s k"     ->   "b s k tp=I cp=R"

    out[..., j] = z[idx_j];   0.0 and no gradient where nobody owns the id

    `tp_group=None` is for a whole vocabulary, `cp_group=None` for a whole sequence. The logits may cover more
    positions than the ids (padding). Results are float32, for float64 logits float64; the gradient has the logits'
    dtype, and duplicates add up in it. `chunk_size` (positions of s per block; None: chosen here) bounds the
    working set of backward; forward reads the logits at the ids alone.
    Cotangents are summed over cp: a loss repeated on each cp rank gives cp times the gradient; divide by cp or
    let each rank own a share.

    Cost:   forward 1 all_reduce of k * b*s/cp numbers over tp, 1 all_gather of as many over cp; backward none over
            tp, 1 reduce_scatter of k * b*s numbers over cp. Saves 4 bytes of each of this rank's ids.
    Errors: TypeError for a group that is none, ids that are no integers, logits not floating; ValueError if
            shapes disagree, the ids cover more positions than the logits, s cannot be cut over cp, or the range or
            chunk_size do not fit.
    """
    function, logits = "vocab_parallel.gather_logits_at_global_indices", vocab_parallel_logits
    if tp_group is not None:
        a.checked_tp_group(function, "tp_group", tp_group)
    a.check_logits(function, LOGITS, logits)
    a.check_ids(function, "global_indices", global_indices)
    a.check_range(function, vocab_start_index, vocab_end_index, LOGITS, logits)
    a.check_chunk_size(function, chunk_size)
    check_positions(function, "global_indices", global_indices, LOGITS, logits, cp_group)
    own = ids_held(global_indices.to(logits.device), logits.shape[1], cp_group)
    found = LogitsAt.apply(logits, own, vocab_start_index, vocab_end_index, tp_group, chunk_size)
    if cp_group is not None:
        found = allgather_cp_sharded_tensor(found, cp_group)
    return found[:, : global_indices.shape[1]]


def _largest_columns(block: Float[Tensor, "n v"], k: int) -> Int64[Tensor, "n k"]:
    """Columns of the k <= v largest, of equal ones the lowest, which come first; torch.topk takes any of them."""
    if k == 0:
        return torch.empty(len(block), 0, dtype=torch.int64, device=block.device)
    z, width = torch.where(block.isnan(), math.inf, block), block.shape[-1]
    least = z.topk(k).values[:, -1:]
    # All that exceed the k-th largest, and the lowest of those that equal it: no two of them have one score.
    score = torch.where(z >= least, torch.arange(width, 0, -1, dtype=torch.int32, device=z.device), 0)
    score.add_(z > least, alpha=width)
    return score.topk(k).indices


def _exchanged(
    values: Float[Tensor, "n k"], ids: Int64[Tensor, "n k"], width: int, group: ProcessGroup
) -> tuple[Float[Tensor, "n r k"], Int64[Tensor, "n r k"], Int[Tensor, " r"]]:
    """Values, ids and widths of all ranks. One all_gather: numbers of one size travel as each other's bits."""
    bits = torch.int32 if values.itemsize == 4 else torch.int64
    own = torch.tensor([width], dtype=bits, device=values.device)
    message = torch.cat([values.view(bits).flatten(), ids.to(bits).flatten(), own])
    everyone = gathered(message.unsqueeze(0), group, 0, [1] * group.size())
    pairs = everyone[:, :-1].view(len(everyone), 2, *values.shape).movedim(0, 2)
    return pairs[0].view(values.dtype), pairs[1].long(), everyone[:, -1]


def _merged(
    values: Float[Tensor, "n r k"], ids: Int64[Tensor, "n r k"], k: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    """The k largest of all ranks' candidates, descending. Equal ones are in the order of their ids already."""
    rows = max(1, MERGED_BYTES // max(1, values[:1].nbytes))
    parts = [_sorted(v.flatten(1), i.flatten(1), k) for v, i in zip(values.split(rows), ids.split(rows), strict=True)]
    return torch.cat([v for v, _ in parts]), torch.cat([i for _, i in parts])


def _sorted(
    values: Float[Tensor, "n c"], ids: Int64[Tensor, "n c"], k: int
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    largest_first = -torch.where(values.isnan(), math.inf, values)
    # NaN is last of all, after a real -inf too.
    key = torch.where(ids == NO_CANDIDATE, math.nan, largest_first)
    order = key.sort(dim=-1, stable=True).indices[:, :k]
    return values.gather(-1, order), ids.gather(-1, order)
