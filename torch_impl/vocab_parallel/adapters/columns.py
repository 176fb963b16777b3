"""Full rows, given columns and the argmax of sharded logits, and a sum over a group, under NeMo-RL's names.

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

    Computes `vocab_parallel_log_softmax` of `vocab_parallel_logits` and gathers its columns in rank order; shards may
    differ in width. Every tp rank passes the same cotangent. The result has a full row per token: 128,000 ids and
    4,096 tokens take 1 GiB in bfloat16. If you need only k ids, `ChunkedDistributedGatherLogprob` gathers k numbers.

    Cost:   as `vocab_parallel_log_softmax`, and forward 1 all_gather of the widest shard, 1 all_gather of one int64
            and one host read; a group of one needs none of the three.
    Errors: as `vocab_parallel_log_softmax`.
    """
    # A group of one has nothing to gather; a gather would only copy the result.
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

    out[..., j] = x[..., global_indices[j]];   0.0 and no gradient for an id outside the vocabulary

    x is the `vocab_parallel_tensor`: logits, log-probabilities or any other floating tensor sharded by columns.
    Duplicates add up in its gradient. Results are float32 (float64 for float64 x); the gradient has x's dtype. Without
    a range, ids are counted in rank order. Every tp rank passes the same cotangent. If each position has its own ids,
    call `gather_logits_at_global_indices`.

    Cost:   forward 1 all_reduce of k numbers of 4 bytes (float64: 8) per row, and without a range 1 all_gather of one
            int64 and one host read; backward none. Saves 4 bytes per number of the result.
    Errors: TypeError if tp_group is not a ProcessGroup, ids are not int32 or int64, x not floating; ValueError if
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
    """The id of the largest logit of each row; of equal logits the lowest id, for any tp.

    The ids are int64 and have no gradient. Columns of `vocab_parallel_logits` past this rank's range are not
    candidates, NaN counts as +inf, and a row of -inf gives its first id. Without a range, ids are counted in rank
    order.

    Cost:   as `distributed_vocab_topk` with k = 1: 1 all_gather of 8 bytes per token (float64: 16) and one number;
            without a range also 1 all_gather of one int64 and one host read.
    Errors: TypeError if tp_group is not a ProcessGroup, or the logits are not floating; ValueError if the range
            does not fit the shard or lacks an end, chunk_size is below 1, or, as the exchange tells, no rank has a
            column.
    """
    start, end = stated_or_counted_range(vocab_parallel_logits, tp_group, vocab_start_index, vocab_end_index)
    _, ids = distributed_vocab_topk(
        vocab_parallel_logits, 1, tp_group, vocab_start_index=start, vocab_end_index=end, chunk_size=chunk_size
    )
    if ids.shape[-1] == 0:  # the same on every rank, since each counts the columns of all ranks
        raise Rejected("no rank of tp has a column of the vocabulary; pass logits of one id or more")
    return ids.squeeze(-1)


@contract
def group_all_reduce_sum(
    tensor: ShardedAny[Tensor, "... tp=P"], group: Group[ProcessGroup, "tp"], with_grad: bool = False
) -> ShardedAny[Tensor, "... tp=I"]:
    """Sum over the ranks of a group, on every rank; differentiable if `with_grad`.

    Each rank's tensor is one term of the sum; `tensor` itself does not change. Every rank passes the same cotangent,
    which is the gradient. If the cotangents are addends, call `torch_impl.collectives.all_reduce` with out="R".
    Without `with_grad` the result does not require grad: use it for counts, such as the number of valid tokens.

    Cost:   forward 1 all_reduce of the tensor, bfloat16 and float16 as float32; backward none. Saves nothing.
    Errors: TypeError if group is not a ProcessGroup; ValueError for bool, whose sum would be a logical or, and for
            integers other than int32 and int64, which overflow or which a backend cannot add.
    """
    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in (torch.int32, torch.int64)):
        raise Rejected(f"tensor is {dtype_name(tensor)}, in which a sum over ranks may not fit; pass tensor.long()")
    return all_reduce(tensor if with_grad else tensor.detach(), group, out="I")
