"""Routers: from a token's logits to its experts and their gates.

Every rank routes its own tokens and sends nothing. Scores are computed in float32 or wider, because a choice is only as
exact as the numbers it compares. Ties go to the lower expert id, so that ranks and runs agree.

`experts` replaces a router's own choice, by the ids that the sampler chose when it generated the tokens, or by the ids
of the forward that a backward recomputes (`RoutingReplay`). The gates are then computed from the scores at these ids.
An id outside 0..e-1, such as -1 for padding, has a gate of 0 and no gradient. The logits of a row without an expert may
be anything, even NaN: they are read as zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_impl.collectives import accumulator
from torch_impl.contract import Finite, PositiveInt, Rejected, Sharded, ShardedIds, ShardedInt, contract


@contract
def softmax_top_k(
    logits: Sharded[Tensor, "... e"],
    k: PositiveInt,
    *,
    norm_topk_prob: bool = False,
    experts: ShardedIds[Tensor, "... k"] | None = None,
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"], Sharded[Tensor, "... e"]]:
    """Softmax, then the k largest: (gates, experts, probabilities), as in Switch, GShard and Qwen3-MoE.

    p = softmax(logits),   experts = the k largest of p,   gates = p[experts]

    `norm_topk_prob` divides the gates by their sum; the gates then equal the gates of `top_k_softmax`. Gates and
    probabilities are float32 or wider, experts int64. The probabilities of all experts are for `global_balance_loss`.

    Cost:   no collective; a sort of e numbers for each token.
    Errors: TypeError for logits that are not floating or a k that is not an integer; ValueError for a k outside 1..e.
    Source: arXiv 2101.03961.
    """
    _check_k(k, logits, experts)
    probabilities = _wide(logits, experts).softmax(-1)
    experts = _largest(probabilities, k) if experts is None else experts.long()
    gates = _at(probabilities, experts, 0.0)
    return _over_their_sum(gates) if norm_topk_prob else gates, experts, probabilities


@contract
def top_k_softmax(
    logits: Sharded[Tensor, "... e"], k: PositiveInt, *, experts: ShardedIds[Tensor, "... k"] | None = None
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"], Sharded[Tensor, "... e"]]:
    """The k largest, then a softmax over these alone: (gates, experts, probabilities), as in Mixtral and gpt-oss.

    experts = the k largest logits,   gates = softmax(logits[experts])

    Gates add up to 1. Dtypes and probabilities are as in `softmax_top_k`.

    Cost:   no collective; a sort of e numbers for each token.
    Errors: as `softmax_top_k`.
    Source: arXiv 2401.04088.
    """
    _check_k(k, logits, experts)
    scores = _wide(logits, experts)
    experts = _largest(scores, k) if experts is None else experts.long()
    gates = _at(scores, experts, -torch.inf).softmax(-1)
    # The softmax of a row without an expert would be NaN.
    is_token = _is_expert(experts, logits).any(-1, keepdim=True)
    return gates.masked_fill(~is_token, 0.0), experts, scores.softmax(-1)


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
    experts: ShardedIds[Tensor, "... k"] | None = None,
) -> tuple[Sharded[Tensor, "... k"], ShardedIds[Tensor, "... k"], Sharded[Tensor, "... e"]]:
    """Sigmoid scores, a bias that only affects the choice, groups of experts, as in DeepSeek-V3.

    s = sigmoid(logits),   experts = the k largest of s + bias in the chosen groups,   gates = s[experts] * scaling

    Returns (gates, experts, probabilities). The experts are split into `groups` runs of equal length. A group's score
    is the sum of its two largest s + bias, and only the `chosen_groups` with the highest scores are searched, so that a
    token goes to few nodes. With `norm_topk_prob` the gates are divided by their sum before they are multiplied by
    `routed_scaling_factor`. The bias has no gradient: `balanced_bias` updates it from the loads. The probabilities are
    s over its sum, for `sequence_balance_loss`. Dtypes are as in `softmax_top_k`.

    Cost:   no collective; a sort of e numbers for each token.
    Errors: as `softmax_top_k`; ValueError for a bias of another length, groups that do not divide e, more chosen groups
            than groups, or a k above the number of experts in the chosen groups.
    Source: arXiv 2412.19437.
    """
    _check_k(k, logits, experts)
    _check_groups(logits.shape[-1], k, groups, chosen_groups)
    scores = _wide(logits, experts).sigmoid()
    # Biased scores decide the choice and have no gradient; the gates are the scores without the bias.
    biased = scores.detach() + bias.detach()
    experts = _largest(_within_groups(biased, groups, chosen_groups), k) if experts is None else experts.long()
    gates = _at(scores, experts, 0.0)
    gates = _over_their_sum(gates) if norm_topk_prob else gates
    return gates * routed_scaling_factor, experts, _over_their_sum(scores)


@contract
def balanced_bias(bias: Sharded[Tensor, "e"], counts: ShardedInt[Tensor, "e"], rate: Finite) -> Sharded[Tensor, "e"]:
    """The bias of `sigmoid_top_k` for the next step: up by `rate` for experts below the mean load, down above it.

    `counts` are summed over all ranks (`load_counts`), so that every rank gets the same bias. No gradient.

    Cost:   no collective.
    Errors: TypeError for a bias that is not floating or counts that are not integers; ValueError for different lengths
            or a rate that is not finite.
    Source: arXiv 2408.15664.
    """
    # Compare e * counts with their sum in integers: the mean is not rounded, and a load equal to it leaves the bias.
    direction = (counts.sum() - counts.numel() * counts).sign()
    return bias.detach() + rate * direction.to(bias.dtype)


def _wide(logits: Tensor, experts: Tensor | None) -> Tensor:
    """The logits in float32 or wider, with 0 in rows without an expert among the given ones."""
    wide = logits.to(accumulator(logits.dtype))
    return wide if experts is None else _ZeroBesideTokens.apply(wide, _is_expert(experts, logits).any(-1, keepdim=True))


class _ZeroBesideTokens(torch.autograd.Function):
    """x with 0 in rows without a token, in values and gradients. A product with 0 would keep their NaN.

    A checkpoint compares what a forward and its recompute save, and only the recompute has given experts: so this saves
    its mask by itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_token: Tensor) -> Tensor:
        ctx.is_token = is_token
        return x.where(is_token, 0.0)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent.where(ctx.is_token, 0.0), None


def _check_k(k: int, logits: Tensor, experts: Tensor | None) -> None:
    if experts is not None and experts.shape[-1] != k:
        raise Rejected(f"experts has {experts.shape[-1]} ids of a token, k={k}; pass k ids of each token")
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
    """The positions of the k largest, by a stable sort: topk breaks ties differently on each device."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _within_groups(biased: Tensor, groups: int, chosen_groups: int) -> Tensor:
    """Set all groups to -inf, except the groups with the largest sums of their two largest scores."""
    by_group = biased.unflatten(-1, (groups, biased.shape[-1] // groups))
    pair_sums = by_group.topk(min(2, by_group.shape[-1])).values.sum(-1)
    is_chosen = torch.zeros_like(pair_sums, dtype=torch.bool).scatter_(-1, _largest(pair_sums, chosen_groups), True)
    return by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)


def _is_expert(experts: Tensor, logits: Tensor) -> Tensor:
    return (experts >= 0) & (experts < logits.shape[-1])


def _at(scores: Tensor, experts: Tensor, otherwise: float) -> Tensor:
    """The scores at these ids; where an id is no expert, the number `otherwise`, without a gradient."""
    is_expert = _is_expert(experts, scores)
    return scores.gather(-1, torch.where(is_expert, experts, 0)).masked_fill(~is_expert, otherwise)


def _over_their_sum(x: Tensor) -> Tensor:
    """Divide x by its sum. A row of zeros, such as padding, stays zero."""
    total = x.sum(-1, keepdim=True)
    return x / total.masked_fill(total == 0, 1.0)
