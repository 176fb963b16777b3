"""The next-token loss, the same on any mesh.

The loss is the sum of token losses divided by the number of valid tokens in the full optimiser step, over all ranks and
microbatches. So the gradient does not depend on how ranks and microbatches divide the step, and there is no other
divisor.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import Group, Groups, Instance, ListOf, PositiveInt, Sharded, ShardedIds, ShardedInt, contract
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
    """-log p(target) of each token; 0 for targets outside [0, vocab_size).

    DTensor's ceil rule shards the vocabulary of `logits` over `tp`. The host reads no target.

    Cost:   as `DistributedLogprob`.
    Errors: as `DistributedLogprob`.
    """
    start, end = ceil_range(vocab_size, tp.size(), tp.rank())
    return -DistributedLogprob.apply(logits, targets, start, end, tp)


Targets = Annotated[
    list[Tensor],
    ListOf(Instance(Tensor, "pass a Tensor", shows_value=False), "tensors", "pass one for each microbatch"),
]


@contract
def valid_count(targets: Targets, groups: Groups, vocab_size: PositiveInt | None = None) -> ShardedInt[Tensor, ""]:
    """The number of valid tokens in an optimiser step: in all local microbatches, summed over the ranks of all groups.

        targets  "b s/cp" of each microbatch   ->   a number, the same on every rank

    `groups` are the groups that shard the batch (dp, cp); each rank is in one group per axis. A token is valid if its
    target is in [0, vocab_size), as in `token_losses`; without `vocab_size`, if it is not negative.

    Cost:   1 all_reduce of one int64 for each group.
    Errors: TypeError for targets that are no list of tensors, or groups no list of groups; ValueError for no targets
            and for a vocab_size below 1.
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
    """This rank's share of the loss: its sum of token `losses` over the global `count`; 0 for a step without tokens.

    `averaged_over` is the number of ranks that gradients are averaged over afterwards: dp * cp under FSDP, 1 if they
    are summed.

    Errors: TypeError unless losses and count are tensors; ValueError for `averaged_over` below 1.
    """
    return losses.sum() * averaged_over / count.clamp_min(1)
