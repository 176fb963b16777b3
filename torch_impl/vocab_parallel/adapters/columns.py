"""Columns of what is sharded over the vocabulary, under the names of NeMo-RL: all of them, some, the largest; a sum.

Each function passes its arguments on to `softmax`, `topk` or the collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import all_gather, all_reduce
from torch_impl.contract import Group, Rejected, Sharded, ShardedAny, ShardedIds, contract, dtype_name
from torch_impl.vocab_parallel.softmax import vocab_parallel_log_softmax
from torch_impl.vocab_parallel.topk import LogitsAt, distributed_vocab_topk
from torch_impl.vocab_parallel.vocab_range import (
    ChunkSize,
    VocabEnd,
    VocabStart,
    all_gather_widths,
    stated_or_counted_range,
)


@contract
def vocab_parallel_full_log_softmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"], tp_group: Group[ProcessGroup, "tp"]
) -> Sharded[Tensor, "... v tp=I"]:
    """Log-softmax of full rows, on every rank, with its gradient.

        vocab_parallel_logits  "b s v/tp"   ->   "b s v tp=I"

    `vocab_parallel_log_softmax`, whose columns are then gathered in rank order; shards may differ in width. Every tp
    rank passes the same cotangent. The result is a full row for each token: of 128,000 ids and 4,096 tokens it takes
    1 GiB in bfloat16. Where k ids are enough, `ChunkedDistributedGatherLogprob` gathers k numbers.

    Cost:   that of `vocab_parallel_log_softmax`; forward 1 all_gather of the widest shard more and 1 of one int64,
            with one host read; in a group of one neither.
    Errors: those of `vocab_parallel_log_softmax`.
    """
    # In this order: on a group of one there is nothing to gather, and the second result would be a copy of the first.
    log_p = vocab_parallel_log_softmax(vocab_parallel_logits, tp_group)
    if tp_group.size() == 1:
        return log_p
    widths = all_gather_widths(log_p.shape[-1], tp_group, log_p.device)
    return all_gather(log_p, tp_group, out="I", dim=-1, lengths=widths)


@contract
def vocab_parallel_gather_columns(
    vocab_parallel_tensor: Sharded[Tensor, "... v/tp"],
    global_indices: ShardedIds[Tensor, "k"],
    tp_group: Group[ProcessGroup, "tp"],
    *,
    vocab_start_index: VocabStart | None = None,
    vocab_end_index: VocabEnd | None = None,
    chunk_size: ChunkSize | None = None,
) -> Sharded[Tensor, "... k tp=I"]:
    """The same k columns of every row, on every rank.

        vocab_parallel_tensor  "b s v/tp"     global_indices  "k"     ->   "b s k tp=I"

    out[..., j] = x[..., idx_j];   0.0 and no gradient for an id outside the vocabulary

    x is any floating tensor of the layout: logits, log-probabilities, hidden columns. Duplicates add up in its
    gradient. Results are float32, for float64 x float64; the gradient has x's dtype. Without a range ids are counted
    in rank order. Every tp rank passes the same cotangent. Where each position has its own ids, call
    `gather_logits_at_global_indices`.

    Cost:   forward 1 all_reduce of k * b*s numbers of 4 bytes (float64: 8), without a range 1 all_gather of one int64
            and one host read more; backward none. Saves 4 bytes for each number of the result.
    Errors: TypeError if tp_group is None or no ProcessGroup, ids are not int32 or int64, x not floating; ValueError if
            the range does not fit the shard or lacks an end, or chunk_size is below 1.
    """
    x = vocab_parallel_tensor
    start, end = stated_or_counted_range(x, tp_group, vocab_start_index, vocab_end_index)
    ids = global_indices.to(x.device).expand(*x.shape[:-1], len(global_indices))
    return LogitsAt.apply(x, ids, start, end, tp_group, chunk_size)


@contract
def vocab_parallel_argmax(
    vocab_parallel_logits: Sharded[Tensor, "... v/tp"],
    tp_group: Group[ProcessGroup, "tp"],
    *,
    vocab_start_index: VocabStart | None = None,
    vocab_end_index: VocabEnd | None = None,
    chunk_size: ChunkSize | None = None,
) -> ShardedIds[Tensor, "..."]:
    """The id of the largest logit of each row; of equal ones the lowest, whatever tp is.

        vocab_parallel_logits  "b s v/tp"   ->   "b s" (no gradient)

    int64. Columns past this rank's range are not candidates, NaN counts as +inf, and a row of -inf gives its first id.
    Without a range ids are counted in rank order.

    Cost:   that of `distributed_vocab_topk` with k = 1: 1 all_gather of 8 bytes per token (float64: 16) and one number
            more; without a range 1 of one int64 and one host read more.
    Errors: TypeError if tp_group is None or no ProcessGroup, or the logits are not floating; ValueError if the range
            does not fit the shard or lacks an end, chunk_size is below 1, or no rank has a column.
    """
    start, end = stated_or_counted_range(vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    _, ids = distributed_vocab_topk(
        vocab_parallel_logits, 1, tp_group, vocab_start_index=start, vocab_end_index=end, chunk_size=chunk_size
    )
    if ids.shape[-1] == 0:  # on every rank alike: the ranks count the columns of all
        raise Rejected("no rank of tp has a column of the vocabulary; pass logits of one id or more")
    return ids.squeeze(-1)


@contract
def group_all_reduce_sum(
    tensor: ShardedAny[Tensor, "... tp=P"], group: Group[ProcessGroup, "tp"], with_grad: bool = False
) -> ShardedAny[Tensor, "... tp=I"]:
    """Sum over the ranks of a group, on each of them; `with_grad` with a gradient, which is the cotangent.

        tensor  "b s tp=P"   ->   "b s tp=I"

    Each rank's tensor is a term, `tensor` itself stays as it is, and every rank passes the same cotangent. Where the
    cotangents are addends, call `torch_impl.collectives.all_reduce` with out="R". Without `with_grad` the result does
    not require grad: use it for counts, as of the valid tokens that a loss is divided by.

    Cost:   forward 1 all_reduce of the tensor, bfloat16 and float16 as float32; backward none. Saves nothing.
    Errors: TypeError if group is None or no ProcessGroup; ValueError for bool, of which the sum would be a logical or,
            and integers other than int32 and int64, which wrap or which a backend does not add.
    """
    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in (torch.int32, torch.int64)):
        raise Rejected(f"tensor is {dtype_name(tensor)}, in which a sum over ranks may not fit; pass tensor.long()")
    return all_reduce(tensor if with_grad else tensor.detach(), group, out="I")
