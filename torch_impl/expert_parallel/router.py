"""Routers: from the logits of a token to the experts that it goes to, and their gates.

Every rank routes its own tokens and sends nothing. Scores are computed in float32 or wider, since a choice is as exact
as the numbers that it compares. Of equal scores the lower expert comes first, so that ranks and runs agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.contract import Finite, PositiveInt, Rejected, Sharded, ShardedIds, ShardedInt, contract


@contract
def softmax_top_k(
    logits: Sharded[Tensor, "... e"], k: PositiveInt, *, norm_topk_prob: bool = False
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"], Sharded[Tensor, "... e"]]:
    """Softmax, then the k largest: (gates, experts, probabilities), as in Switch, GShard and Qwen3-MoE.

    p = softmax(logits),   experts = the k largest of p,   gates = p[experts], over their sum with `norm_topk_prob`

    Gates and probabilities are in float32 or wider, experts int64. With `norm_topk_prob` the gates are those of
    `top_k_softmax`. The probabilities, of all experts, are for `global_balance_loss`.

    Cost:   no collective; a sort of e numbers a token.
    Errors: TypeError for logits that are not floating or a k that is no integer; ValueError for a k outside 1..e.
    Source: arXiv 2101.03961.
    """
    _check_k(k, logits)
    probabilities = logits.to(accumulator(logits.dtype)).softmax(-1)
    experts = _largest(probabilities, k)
    gates = probabilities.gather(-1, experts)
    return _over_their_sum(gates) if norm_topk_prob else gates, experts, probabilities


@contract
def top_k_softmax(
    logits: Sharded[Tensor, "... e"], k: PositiveInt
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"], Sharded[Tensor, "... e"]]:
    """The k largest, then the softmax over these alone: (gates, experts, probabilities), as in Mixtral and gpt-oss.

    experts = the k largest logits,   gates = softmax(logits[experts])

    Gates add up to 1. Dtypes and probabilities are those of `softmax_top_k`.

    Cost:   no collective; a sort of e numbers a token.
    Errors: those of `softmax_top_k`.
    Source: arXiv 2401.04088.
    """
    _check_k(k, logits)
    scores = logits.to(accumulator(logits.dtype))
    experts = _largest(scores, k)
    return scores.gather(-1, experts).softmax(-1), experts, scores.softmax(-1)


@contract
def sigmoid_top_k(
    logits: Sharded[Tensor, "... e"],
    bias: Sharded[Tensor, "e"],
    k: PositiveInt,
    *,
    groups: PositiveInt = 1,
    chosen_groups: PositiveInt = 1,
    norm_topk_prob: bool = True,
    routed_scaling_factor: Finite = 1.0,
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"], Sharded[Tensor, "... e"]]:
    """Sigmoid scores, a bias for the choice alone, groups of experts: (gates, experts, probabilities), as DeepSeek-V3.

    s = sigmoid(logits),   experts = the k largest of s + bias in the chosen groups,   gates = s[experts] * scaling

    The experts are `groups` runs of equal length. A group counts as much as the sum of its two largest s + bias, and
    `chosen_groups` of them are searched: a token then goes to few nodes. With `norm_topk_prob` the gates are divided
    by their sum before `routed_scaling_factor`. The bias has no gradient: `balanced_bias` moves it by the loads. The
    probabilities are s over its sum, for `sequence_balance_loss`. Dtypes are those of `softmax_top_k`.

    Cost:   no collective; a sort of e numbers a token.
    Errors: those of `softmax_top_k`; ValueError for a bias of another length, groups that do not divide e, more chosen
            groups than groups, or a k beyond the experts of the chosen groups.
    Source: arXiv 2412.19437.
    """
    _check_k(k, logits)
    _check_groups(logits.shape[-1], k, groups, chosen_groups)
    scores = logits.to(accumulator(logits.dtype)).sigmoid()
    # The choice is by the biased scores and has no gradient; the gates are the plain scores.
    experts = _largest(_within_groups(scores.detach() + bias.detach(), groups, chosen_groups), k)
    gates = scores.gather(-1, experts)
    gates = _over_their_sum(gates) if norm_topk_prob else gates
    return gates * routed_scaling_factor, experts, _over_their_sum(scores)


@contract
def balanced_bias(bias: Sharded[Tensor, "e"], counts: ShardedInt[Tensor, "e"], rate: Finite) -> Sharded[Tensor, "e"]:
    """The bias of `sigmoid_top_k` for the next step: up by `rate` for experts below the mean load, down above it.

        bias "e", counts "e"   ->   "e"

    `counts` are those of all ranks, from `load_counts`, so that every rank has the same bias. No gradient.

    Cost:   no collective.
    Errors: TypeError for a bias that is not floating or counts that are no integers; ValueError for another length or a
            rate that is not finite.
    Source: arXiv 2408.15664.
    """
    # In integers, e * counts against their sum: no mean is rounded, and a load that is equal to it moves nothing.
    direction = (counts.sum() - counts.numel() * counts).sign()
    return bias.detach() + rate * direction.to(bias.dtype)


def _check_k(k: int, logits: Tensor) -> None:
    if k > logits.shape[-1]:
        raise Rejected(f"k={k} of e={logits.shape[-1]} experts; choose at most e")


def _check_groups(experts: int, k: int, groups: int, chosen_groups: int) -> None:
    if experts % groups:
        raise Rejected(f"groups={groups} must divide e={experts} experts")
    if chosen_groups > groups:
        raise Rejected(f"chosen_groups={chosen_groups} of groups={groups}; choose at most all")
    candidates = experts // groups * chosen_groups
    if k > candidates:
        raise Rejected(f"k={k} of {candidates} experts in chosen_groups={chosen_groups}; choose more groups")


def _largest(scores: Tensor, k: int) -> Tensor:
    """The positions of the k largest. By a stable sort: which of equal scores topk returns differs by device."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _within_groups(biased: Tensor, groups: int, chosen_groups: int) -> Tensor:
    """The scores, -inf outside of the groups whose two largest scores have the largest sums."""
    by_group = biased.unflatten(-1, (groups, biased.shape[-1] // groups))
    of_two = by_group.topk(min(2, by_group.shape[-1])).values.sum(-1)
    is_chosen = torch.zeros_like(of_two, dtype=torch.bool).scatter_(-1, _largest(of_two, chosen_groups), True)
    return by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)


def _over_their_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)
