"""The loss of next tokens and the norm of its gradient, the same on any mesh.

The loss is the sum of token losses over the global count of valid tokens. The count is that of the whole optimiser
step: all ranks, all microbatches. So the gradient is that of one number, however the step is cut into ranks and
microbatches, and no other divisor is due anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl.collectives import accumulator
from torch_impl.vocab_parallel import DistributedLogprob
from torch_impl.vocab_parallel.vocab_range import ceil_range

NOBODY = -100  # the target of a token whose loss does not count


def token_losses(
    logits: Float[Tensor, "b s v"], targets: Int[Tensor, "b s"], tp: ProcessGroup, vocab_size: int
) -> Float[Tensor, "b s"]:
    """-log p(target) of each token, 0 where the target is nobody's: any id outside of [0, vocab_size).

        logits  "b s/cp v/tp"   targets  "b s/cp"   ->   "b s/cp tp=I"

    The vocabulary is cut over tp by DTensor's ceil rule. No target is read on the host.

    Cost:   that of `DistributedLogprob`.
    Errors: those of `DistributedLogprob`.
    """
    start, end = ceil_range(vocab_size, tp.size(), tp.rank())
    return -DistributedLogprob.apply(logits, targets, start, end, tp)


def valid_count(
    targets: Sequence[Int[Tensor, "b s"]], groups: Sequence[ProcessGroup], vocab_size: int | None = None
) -> Int[Tensor, ""]:
    """How many tokens of an optimiser step count: in all its microbatches here, summed over the ranks of all groups.

        targets  "b s/cp" of each microbatch   ->   a number, the same on every rank

    `groups` are those that cut the batch (dp, cp), each rank in one group of each. What counts is what has a loss in
    `token_losses`: targets in [0, vocab_size); without `vocab_size` those that are not negative.

    Cost: 1 all_reduce of one int64 for each group.
    """
    end = torch.iinfo(torch.int32).max if vocab_size is None else vocab_size
    count = torch.stack([((each >= 0) & (each < end)).sum() for each in targets]).sum()
    for group in groups:
        dist.all_reduce(count, group=group)
    return count


def normalised(losses: Float[Tensor, "b s"], count: Int[Tensor, ""], averaged_over: int = 1) -> Float[Tensor, ""]:
    """This rank's share of the loss: the sum of its token losses over the global count, 0 of a step without tokens.

        losses  "b s/cp"   count  one number   ->   "dp=P cp=P"

    `averaged_over` is how many ranks the gradients are averaged over afterwards: dp * cp under FSDP, 1 where they are
    summed.
    """
    return losses.sum() * averaged_over / count.clamp_min(1)


def gradient_norm(parameters: Iterable[nn.Parameter], pp: ProcessGroup | None = None) -> Float[Tensor, ""]:
    """sqrt(sum of squares) over all gradients, the same on every rank; a parameter without one counts nothing.

    What is cut is summed over the axes that cut it, what is repeated is counted once, as its DTensor says. Where the
    ranks of `pp` have other parameters each, theirs are added; of one that two stages share pass one copy alone
    (`pipelining.tied_weights.distinct_parameters`).

    Cost:   1 all_reduce of one number for each axis of each way in which parameters are cut, and 1 over pp.
    Errors: ValueError for a gradient that is still a sum of addends.
    """
    parameters = list(parameters)
    squares: dict[tuple[tuple[int, ...], ...], tuple[tuple[ProcessGroup, ...], list[Tensor]]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups = _cut_by(gradient)
        # By their ranks: of equal meshes DTensor may give either, each with groups of its own, on one rank and not all.
        key = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
        squares.setdefault(key, (groups, []))[1].append(local.to(accumulator(local.dtype)).square().sum())
    total = torch.zeros(())
    for parameter in parameters:  # the same dtype on every rank, whichever gradients it has
        total = total.to(parameter.device, torch.promote_types(total.dtype, parameter.dtype))
    for groups, parts in squares.values():
        own = torch.stack(parts).sum()
        for group in groups:
            dist.all_reduce(own, group=group)
        total = total + own
    if pp is not None:
        dist.all_reduce(total, group=pp)
    return total.sqrt()


def _cut_by(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups of the axes that cut a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"models.gradient_norm: a gradient is {gradient.placements}; reduce it first")
    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(axis) for axis in cut)
