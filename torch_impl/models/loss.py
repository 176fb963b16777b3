"""The loss of next tokens, the same on any mesh.

The loss is the sum of token losses over the global count of valid tokens. The count is that of the full optimiser
step: all ranks, all microbatches. So the gradient is that of one number, however the step is divided into ranks and
microbatches, and no other divisor is due anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Group, PositiveInt, Sharded, ShardedIds, ShardedInt, contract
from torch_impl.vocab_parallel import DistributedLogprob
from torch_impl.vocab_parallel.vocab_range import ceil_range

IGNORED = -100  # the target of a token whose loss does not count


@contract
def token_losses(
    logits: Sharded[Tensor, "b s/cp v/tp"],
    targets: ShardedIds[Tensor, "b s/cp"],
    tp: Group[ProcessGroup, "tp"],
    vocab_size: PositiveInt,
) -> Sharded[Tensor, "b s/cp tp=I"]:
    """-log p(target) of each token, 0 where the target is outside of [0, vocab_size).

        logits  "b s/cp v/tp"   targets  "b s/cp"   ->   "b s/cp tp=I"

    The vocabulary is sharded over tp by DTensor's ceil rule. No target is read on the host.

    Cost:   that of `DistributedLogprob`.
    Errors: those of `DistributedLogprob`.
    """
    start, end = ceil_range(vocab_size, tp.size(), tp.rank())
    return -DistributedLogprob.apply(logits, targets, start, end, tp)


@contract
def valid_count(
    targets: Sequence[Tensor], groups: Sequence[ProcessGroup], vocab_size: PositiveInt | None = None
) -> ShardedInt[Tensor, ""]:
    """How many tokens of an optimiser step count: in all its local microbatches, summed over the ranks of all groups.

        targets  "b s/cp" of each microbatch   ->   a number, the same on every rank

    `groups` are those that shard the batch (dp, cp), each rank in one group of each. A token counts if it has a loss in
    `token_losses`: its target is in [0, vocab_size); without `vocab_size`, if it is not negative.

    Cost:   1 all_reduce of one int64 for each group.
    Errors: ValueError for a vocab_size below 1.
    """
    end = torch.iinfo(torch.int32).max if vocab_size is None else vocab_size
    count = torch.stack([((each >= 0) & (each < end)).sum() for each in targets]).sum()
    for group in groups:
        dist.all_reduce(count, group=group)
    return count


@contract
def normalised(
    losses: Sharded[Tensor, "..."], count: ShardedInt[Tensor, ""], averaged_over: PositiveInt = 1
) -> Sharded[Tensor, "dp=P cp=P"]:
    """This rank's share of the loss: the sum of its token losses over the global count, 0 for a step without tokens.

        losses  "b s/cp"   count  one number   ->   "dp=P cp=P"

    `averaged_over` is the number of ranks that gradients are averaged over afterwards: dp * cp under FSDP, 1 where they
    are summed.

    Errors: TypeError unless tensors; ValueError for `averaged_over` below 1.
    """
    return losses.sum() * averaged_over / count.clamp_min(1)
