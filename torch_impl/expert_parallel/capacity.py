"""Expert capacity: how many choices each expert takes, and which choices are dropped beyond that.

If the group is all ranks that have tokens, the rule is global: tokens are ordered by rank, then by row, and the result
does not depend on the number of ranks. Over a smaller group the rule sees that group's tokens only, with a capacity of
the group's own, and the result is a different function of the tokens.
"""

from __future__ import annotations

import math
from fractions import Fraction
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
    """The number of choices that each expert takes: `factor` times the mean load, rounded up.

    ceil(factor * tokens * k / num_experts), where each of `tokens` tokens has k choices among num_experts experts. A
    decimal factor is exact: 1.1 times 100 is 110.

    >>> expert_capacity(4096, k=2, num_experts=8, factor=1.25)
    1280

    Errors: TypeError for sizes that are not integers; ValueError for k or num_experts below 1, tokens below 0 or a
            factor that is not positive.
    Source: arXiv 2101.03961.
    """
    return math.ceil(Fraction(str(factor)) * tokens * k / num_experts)


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
    """Keep `capacity` choices per expert over the whole group; returns True for each choice that is kept.

    `by` "position" keeps the first choices, with tokens ordered by rank, then by row; "probability" keeps the choices
    with the largest gates, and the first of equal ones. The remaining gates are not scaled up. Ids outside
    0..num_experts - 1, such as -1 for padding, are not kept. Ranks may have different numbers of tokens.

    Cost:   position    1 all_gather of num_experts counts, none in a group of one.
            probability 1 all_gather of the experts and 1 of the gates; 1 of t, none in a group of one.
            No backward. Saves nothing.
    Errors: TypeError for a wrong type; ValueError for shapes that do not fit, num_experts below 1, a negative capacity
            or an unknown rule.
    Source: arXiv 2006.16668 (position), 2202.09368 (experts choose among tokens).
    """
    # Invalid expert ids map to index num_experts, which is not counted.
    is_expert = (experts >= 0) & (experts < num_experts)
    experts = torch.where(is_expert, experts.long(), num_experts)
    if by == "position":
        places = _places(experts, _counts_before(experts, num_experts, group)).view(experts.shape)
        return is_expert & (places < capacity)
    # 1. Every rank sorts all choices by falling gate, equal gates by position.
    lengths = all_gather_stack(torch.tensor(len(experts), device=experts.device), group).tolist()
    all_experts = all_gather_concat(experts, group, 0, lengths)
    all_gates = all_gather_concat(gates.detach(), group, 0, lengths)
    by_gate = all_gates.flatten().argsort(descending=True, stable=True)
    # 2. Find each choice's place among its expert's choices in that order, undo the sort, take this rank's tokens.
    places = torch.empty_like(by_gate)
    ranked = all_experts.flatten()[by_gate]
    places[by_gate] = _places(ranked, ranked.new_zeros(num_experts + 1))
    return is_expert & (places.view(all_experts.shape).split(lengths)[group.rank()] < capacity)


def _counts_before(experts: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """The number of choices per expert on the ranks before this one, and a 0 for invalid ids."""
    counts = all_gather_stack(sorted_choices(experts, size).counts, group)
    return pad(counts[: group.rank()].sum(0), (0, 1))


def _places(experts: Tensor, before: Tensor) -> Tensor:
    """The place of each choice among its expert's choices, which starts at `before[expert]`."""
    numbers = experts.flatten()
    order = numbers.argsort(stable=True)
    in_order = numbers[order]
    # A choice's place is its distance from its expert's first choice in sorted order.
    starts = torch.searchsorted(in_order, in_order)
    distances = torch.arange(len(order), device=order.device) - starts
    places = torch.empty_like(order)
    places[order] = distances + before[in_order]
    return places
