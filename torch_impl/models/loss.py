"""The loss of an optimiser step, the same on any mesh.

A step's loss is a sum over its tokens. Each token's loss is divided by a count over the full step: over all ranks and
all microbatches. For a mean over tokens it is the number of valid tokens. For a mean over sequences it is the number of
sequences; if each sequence is averaged too, it is that number times the length of the token's sequence. So the gradient
does not depend on how ranks and microbatches divide the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.contract import (
    Group,
    Groups,
    Instance,
    ListOf,
    PositiveInt,
    Rejected,
    Sharded,
    ShardedIds,
    ShardedInt,
    Sizes,
    contract,
    dtype_name,
)
from torch_impl.contract.tensor_kinds import TensorKind
from torch_impl.layouts import TokenLayout
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
    Errors: TypeError unless targets is a list of tensors and groups a list of groups; ValueError for no targets and for
            a vocab_size below 1.
    """
    end = torch.iinfo(torch.int32).max if vocab_size is None else vocab_size
    count = torch.stack([((each >= 0) & (each < end)).sum() for each in targets]).sum()
    return _summed(count, groups)


Aggregation = Literal["token_mean", "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "token_sum"]
Masks = Annotated[
    list[Tensor],
    ListOf(Instance(Tensor, "pass a Tensor", shows_value=False), "tensors", "pass one for each microbatch"),
]
Layouts = Annotated[
    list[TokenLayout], ListOf(Instance(TokenLayout, "pass a TokenLayout", shows_value=False), "layouts")
]


@contract
def loss_divisors(
    masks: Masks,
    aggregation: Aggregation,
    dp_groups: Groups,
    cp_group: Group[ProcessGroup, "cp"],
    *,
    layouts: Layouts | None = None,
    constant: PositiveInt | Tensor = 1,
) -> list[ShardedInt[Tensor, "b s/cp"]]:
    """The number that each token's loss is divided by, for each microbatch; 0 for a token that does not count.

    `masks` has for each local microbatch a bool tensor "b s/cp", True for a token that counts. Pass the divisors of a
    microbatch to `normalised` as its `count`; the shares of all microbatches and ranks add up to the step's loss:

        token_mean                     the mean over all tokens
        sequence_mean_of_token_means   the mean over sequences of each sequence's mean over its tokens
        sequence_mean_of_token_sums    the mean over sequences of each sequence's sum over its tokens
        token_sum                      the sum over all tokens

    Each of these is also divided by `constant`, one number for the full step: the longest allowed response, or for
    `token_sum` a count that the caller has (`num_label_tokens`). The host does not read a tensor.

    Without `layouts` each row is one sequence. With `layouts`, a TokenLayout for each microbatch, each row has the
    layout's sequences. A sequence counts only if one of its tokens counts: rows of padding change nothing, so ranks may
    have different numbers of rows. A rank without a microbatch passes one of 0 rows; ranks of `cp_group` have the same
    rows. `dp_groups` are the groups of ranks with other sequences (dp, ep), one for each axis.

    Cost:   sequence_mean: 1 all_reduce over cp of an int64 for each sequence of all microbatches, and 1 all_reduce of
            one int64 for each of `dp_groups`. token_mean: 1 all_reduce of one int64 for each of all groups. token_sum:
            none. The host reads no mask.
    Errors: TypeError unless masks is a list of bool tensors; ValueError for no masks, a mask that is not
            [b, s/cp], layouts that are not one for each mask or do not have its columns, an unknown aggregation, an
            int `constant` below 1, and a tensor that is not one number.
    Source: arXiv 2503.20783 (a constant for a count of tokens).
    """
    check_constant(constant)
    _check_masks(masks, layouts)
    # 1. Count the tokens of each sequence: on this rank, and over cp, which cuts sequences.
    sequences = [_sequences(mask, layout) for mask, layout in zip(masks, layouts or [None] * len(masks), strict=True)]
    lengths = torch.cat([_lengths(*each) for each in zip(masks, sequences, strict=True)])
    of_sequences = aggregation.startswith("sequence")
    if of_sequences:
        lengths = _summed(lengths, [cp_group])
    # 2. Count the tokens or sequences of the step. All cp ranks have the same sequences, each of which counts once.
    divisor = torch.ones_like(lengths)
    if of_sequences:
        divisor = _summed((lengths > 0).sum(), dp_groups) * divisor
    elif aggregation == "token_mean":
        divisor = _summed(lengths.sum(), [cp_group, *dp_groups]) * divisor
    if aggregation == "sequence_mean_of_token_means":
        divisor = divisor * lengths
    # 3. Give each token the divisor of its sequence.
    each = (divisor * constant).split([number for _, number in sequences])
    return [torch.where(mask, own[ids], 0) for mask, (ids, _), own in zip(masks, sequences, each, strict=True)]


class CountKind:
    """A count of tokens: one integer, or one for each loss."""

    spec, other_specs = "...", ()

    def problem_beside(self, name: str, value: Any, sizes: Sizes) -> str | None:
        is_one = isinstance(value, Tensor) and value.ndim == 0
        return TensorKind("" if is_one else self.spec, "integer").problem_beside(name, value, sizes)


@contract
def normalised(
    losses: Sharded[Tensor, "..."], count: Annotated[Tensor, CountKind()], averaged_over: PositiveInt = 1
) -> Sharded[Tensor, "dp=P cp=P"]:
    """This rank's share of the loss: its sum of token `losses`, each over its global `count`; 0 without tokens.

    `count` is one number (`valid_count`), or one for each loss (`loss_divisors`). A loss whose own count is 0 does not
    count, whatever its value: its gradient is 0, also where it is NaN. `averaged_over` is the number of ranks that
    gradients are averaged over afterwards: dp * cp under FSDP, 1 if they are summed. In float32 or wider.

    Errors: TypeError unless losses and count are tensors; ValueError for `averaged_over` below 1, and a count that is
            neither one number nor has the shape of losses.
    """
    wide = losses.to(accumulator(losses.dtype))
    if count.ndim:
        return (wide.where(count > 0, 0.0) / count.clamp_min(1)).sum() * averaged_over
    return wide.sum() * averaged_over / count.clamp_min(1)


def _summed(count: Tensor, groups: Iterable[ProcessGroup]) -> Tensor:
    """A new integer tensor summed in place over the ranks of all groups."""
    for group in groups:
        dist.all_reduce(count, group=group)
    return count


def _sequences(mask: Tensor, layout: TokenLayout | None) -> tuple[Tensor, int]:
    """The sequence of each token, numbered within the microbatch; and the number of sequences."""
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    if layout is None:
        return rows.expand_as(mask), len(mask)
    number, local = len(layout.cu_padded) - 1, layout.on(mask.device)
    return rows * number + local.sequence_ids[local.local_index], len(mask) * number


def _lengths(mask: Tensor, sequences: tuple[Tensor, int]) -> Tensor:
    """The number of this rank's tokens of each sequence."""
    ids, number = sequences
    return ids.new_zeros(number).scatter_add_(0, ids.flatten(), mask.flatten().long())


def check_constant(constant: int | Tensor) -> None:
    """Rejected for a tensor that is not one number."""
    if isinstance(constant, Tensor) and constant.ndim:
        raise Rejected(f"constant is {list(constant.shape)}; pass one number for the full step")


def _check_masks(masks: list[Tensor], layouts: list[TokenLayout] | None) -> None:
    """Rejected for masks that are not bool [b, s/cp], or that layouts do not fit."""
    for i, mask in enumerate(masks):
        if mask.dtype != torch.bool:
            raise Rejected(f"masks[{i}] is {dtype_name(mask)}; pass bools, such as targets >= 0", TypeError)
        if mask.ndim != 2:
            raise Rejected(f"masks[{i}] is {list(mask.shape)}; pass [b, s/cp]")
    if layouts is None:
        return
    if len(layouts) != len(masks):
        raise Rejected(f"layouts has {len(layouts)} for {len(masks)} masks; pass one for each microbatch")
    for i, (mask, layout) in enumerate(zip(masks, layouts, strict=True)):
        if mask.shape[1] != (columns := layout.counts[layout.cp_rank]):
            raise Rejected(
                f"masks[{i}] is {list(mask.shape)} but its layout has {columns} local tokens; pass [b, t/cp]"
            )
