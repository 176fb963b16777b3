"""Capacity: how many choices an expert takes, and which ones are dropped where it has more.

The rule is global where the group is all ranks that have tokens: tokens are in the order of ranks, rows in order within
one, and the result does not depend on how many ranks there are. Over a group of one rank, or of some, it is a rule of
these alone, with a capacity of their own, and another function of the tokens.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from torch_impl.collectives.plain import all_gather_concat, all_gather_stack
from torch_impl.contract import (
    Group,
    NonNegativeInt,
    OneOf,
    Positive,
    PositiveInt,
    Sharded,
    ShardedBool,
    ShardedInt,
    contract,
)
from torch_impl.expert_parallel.dispatch import sorted_choices

RULES = ("position", "probability")
RuleName = Annotated[Literal["position", "probability"], OneOf(RULES)]


@contract
def expert_capacity(tokens: NonNegativeInt, k: PositiveInt, num_experts: PositiveInt, factor: Positive) -> int:
    """The choices that each expert takes: `factor` times the mean load, rounded up.

    ceil(factor * tokens * k / num_experts), where each of `tokens` tokens has k choices among num_experts experts.

    >>> expert_capacity(4096, k=2, num_experts=8, factor=1.25)
    1280

    Errors: TypeError for sizes that are no integers; ValueError for k or num_experts below 1, tokens below 0 or a
            factor that is not positive.
    Source: arXiv 2101.03961.
    """
    return math.ceil(factor * tokens * k / num_experts)


@contract
def kept_choices(
    experts: ShardedInt[Tensor, "t/ranks k"],
    gates: Sharded[Tensor, "t/ranks k"],
    num_experts: PositiveInt,
    capacity: NonNegativeInt,
    group: Group[ProcessGroup, "ranks"],
    *,
    by: RuleName,
) -> ShardedBool[Tensor, "t/ranks k"]:
    """Which choices are kept where each of num_experts experts takes `capacity` of those of all ranks of the group.

        experts "t/ranks k", gates "t/ranks k"   ->   "t/ranks k"

    `by` "position" keeps the first, tokens in the order of ranks and of rows; "probability" keeps those with the
    largest gates, of equal ones the first. Gates that are left are not scaled up. A number that is no expert's, such
    as -1 for padding, is not kept. Ranks may have different numbers of tokens.

    Cost:   position    1 all_gather of num_experts counts, none in a group of one.
            probability 1 all_gather of the experts and 1 of the gates; 1 of t, none in a group of one.
            No backward. Saves nothing.
    Errors: TypeError for another type; ValueError for shapes that do not fit, num_experts below 1, a negative capacity
            or another rule.
    Source: arXiv 2006.16668 (position), 2202.09368 (the choice of an expert among tokens).
    """
    # What is no expert's gets one number more, so that it is counted for none.
    is_expert = (experts >= 0) & (experts < num_experts)
    experts = torch.where(is_expert, experts.long(), num_experts)
    if by == "position":
        places = _places(experts, _counts_before(experts, num_experts, group)).view(experts.shape)
        return is_expert & (places < capacity)
    # 1. Every rank ranks all choices: by falling gate, of equal ones the first.
    lengths = all_gather_stack(torch.tensor(len(experts), device=experts.device), group).tolist()
    all_experts = all_gather_concat(experts, group, 0, lengths)
    all_gates = all_gather_concat(gates.detach(), group, 0, lengths)
    by_gate = all_gates.flatten().argsort(descending=True, stable=True)
    # 2. The place of a choice in that order among those of its expert; then back, and to the tokens of this rank.
    places = torch.empty_like(by_gate)
    ranked = all_experts.flatten()[by_gate]
    places[by_gate] = _places(ranked, ranked.new_zeros(num_experts + 1))
    return is_expert & (places.view(all_experts.shape).split(lengths)[group.rank()] < capacity)


def _counts_before(experts: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Of each expert the choices of the ranks before this one; 0 for the number of no expert."""
    counts = all_gather_stack(sorted_choices(experts, size).counts, group)
    return pad(counts[: group.rank()].sum(0), (0, 1))


def _places(experts: Tensor, before: Tensor) -> Tensor:
    """How many choices of the same expert come before each choice, those `before` the first one included."""
    numbers = experts.flatten()
    order = numbers.argsort(stable=True)
    in_order = numbers[order]
    # A choice's place is its distance from the first one of its expert in sorted order.
    starts = torch.searchsorted(in_order, in_order)
    distances = torch.arange(len(order), device=order.device) - starts
    places = torch.empty_like(order)
    places[order] = distances + before[in_order]
    return places
