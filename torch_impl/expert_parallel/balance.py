"""Auxiliary losses of a router, and the loads that its bias follows.

    loss = e * sum_e f_e P_e

f_e is expert e's share of the choices, a count without a gradient, and P_e is the mean probability of e over the
tokens. The three losses compute f and P over different sets of tokens, so their values differ: the mean over ranks of
products is not the product of means.

A token is a row with at least one expert. A row without an expert, such as padding with the id -1, is not counted: not
in f, not in P, not in the number of tokens, and its gradient is 0 for any values. If capacity has dropped some of a
row's k experts, the row is still a token: its probabilities count once, and f counts the remaining choices. So the loss
is 1 for equal loads, for any number of dropped choices.

Each rank returns its addend: the ranks' losses add up to the loss, and their gradients to its gradient, like the losses
of the language model. A value that is equal on all ranks would be counted once per rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator
from torch_impl.collectives.plain import all_reduce_sum
from torch_impl.contract import Group, PositiveInt, Rejected, Sharded, ShardedInt, contract
from torch_impl.contract.derivatives import first_derivative_only


@contract
def load_counts(
    experts: ShardedInt[Tensor, "... k"], num_experts: PositiveInt, group: Group[ProcessGroup, "data"]
) -> ShardedInt[Tensor, "e"]:
    """How often each expert is chosen on all ranks of `group`: the ranks with different tokens, dp x cp x ep.

    An invalid expert id, such as -1 for padding, is not counted.

    Cost:   1 all_reduce of num_experts int64. No gradient.
    Errors: TypeError for a wrong type; ValueError for num_experts below 1.
    """
    return all_reduce_sum(_totals(experts.flatten()[None, :, None], num_experts)[0, :-1], group)


@contract
def token_count(
    experts: ShardedInt[Tensor, "... k"], num_experts: PositiveInt, group: Group[ProcessGroup, "data"]
) -> ShardedInt[Tensor, ""]:
    """The number of tokens on all ranks of `group`: rows with at least one expert, so padding is not counted.

    Cost:   1 all_reduce of 1 int64. No gradient.
    Errors: TypeError for a wrong type; ValueError for num_experts below 1.
    """
    return all_reduce_sum(_is_token(experts, num_experts).sum(), group)


@contract
def global_balance_loss(
    probabilities: Sharded[Tensor, "t/data e"],
    experts: ShardedInt[Tensor, "t/data k"],
    group: Group[ProcessGroup, "data"],
) -> Sharded[Tensor, "data=P"]:
    """This rank's addend of the balance loss over the tokens of all ranks in `group`, dp x cp x ep.

    e * sum_e f_e P_e with f and P over all tokens: the value does not depend on the sharding. The addend is
    e * sum_e f_e (sum of this rank's probabilities of e) / t, with the global f and t, so its gradient is complete
    without another exchange. The loss is 1 for equal loads or equal probabilities, and 0 without tokens. Rows without
    an expert are not counted. In float32 or wider.

    Cost:   forward 1 all_reduce of e + 1 int64; backward none. Saves e numbers and t bools.
    Errors: TypeError for a wrong type; ValueError for shapes that do not fit.
    Source: arXiv 2101.03961, 2501.11873 (over the global batch).
    """
    is_token = _is_token(experts, probabilities.shape[-1])
    totals = all_reduce_sum(_totals(experts[None], probabilities.shape[-1]), group)
    return _loss(probabilities[None], is_token[None], totals)[0]


@contract
def sequence_balance_loss(
    probabilities: Sharded[Tensor, "b s/cp e"],
    experts: ShardedInt[Tensor, "b s/cp k"],
    cp_group: Group[ProcessGroup, "cp"],
) -> Sharded[Tensor, "b cp=P"]:
    """This rank's addend of the balance loss of each sequence, whose tokens are sharded over cp in any order.

    e * sum_e f_e P_e with f and P over one sequence, whose tokens are on the ranks of `cp_group`; 0 for a sequence
    without tokens. Divide the sum over sequences by their number on all ranks of dp. Rows without an expert are not
    counted. In float32 or wider.

    Cost:   forward 1 all_reduce of b * (e + 1) int64 over cp; backward none. Saves b * e numbers and b * s bools.
    Errors: TypeError for a wrong type; ValueError for shapes that do not fit.
    Source: arXiv 2412.19437.
    """
    is_token = _is_token(experts, probabilities.shape[-1])
    totals = all_reduce_sum(_totals(experts, probabilities.shape[-1]), cp_group)
    return _loss(probabilities, is_token, totals)


@contract
def rank_balance_loss(
    probabilities: Sharded[Tensor, "t/data e"], experts: ShardedInt[Tensor, "t/data k"]
) -> Sharded[Tensor, ""]:
    """The balance loss of this rank's tokens alone; 0 without tokens.

    e * sum_e f_e P_e with f and P over one rank's tokens. Divide by the number of ranks: the sum is then the mean over
    ranks, which balances the loads on every rank and is a different function of the tokens for each number of ranks.
    Rows without an expert are not counted. In float32 or wider.

    Cost:   no collective. Saves e numbers and t bools.
    Errors: TypeError for a wrong type; ValueError for shapes that do not fit.
    Source: arXiv 2006.16668 (of each group of tokens).
    """
    is_token = _is_token(experts, probabilities.shape[-1])
    totals = _totals(experts[None], probabilities.shape[-1])
    return _loss(probabilities[None], is_token[None], totals)[0]


@contract
def z_loss(
    logits: Sharded[Tensor, "t/data e"],
    tokens: PositiveInt | Tensor,
    experts: ShardedInt[Tensor, "t/data k"] | None = None,
) -> Sharded[Tensor, "data=P"]:
    """This rank's addend of the z loss: the mean of (log sum_e exp(logits))^2 over the `tokens` tokens of all ranks.

    The loss keeps a router's logits small. With `experts`, rows without an expert are not counted, and `tokens` is the
    number of the other rows on all ranks: an int, or the tensor of `token_count`, which is not copied to the host.
    Without `experts` every row is a token. In float32 or wider.

    Cost:   no collective. Saves the logits, and t bools with `experts`.
    Errors: TypeError for a wrong type; ValueError for shapes that do not fit, and for an int `tokens` below 1.
    Source: arXiv 2202.08906.
    """
    if not logits.shape[-1]:
        raise Rejected(f"logits is {list(logits.shape)}; pass the logits of one expert or more")
    wide = logits.to(accumulator(logits.dtype))
    is_token = None if experts is None else _is_token(experts, logits.shape[-1])
    if is_token is not None:
        wide = wide.where(is_token[..., None], 0.0)  # before the exponential: the gradient of NaN * 0 is NaN
    # The gradient of torch.logsumexp is exp(logits - result), and its error grows with the logits. The gradient of
    # these lines is exp(logits - maximum) / sum: only the difference is rounded before the exponential.
    row_max = wide.detach().amax(-1, keepdim=True)
    log_sum = (wide - row_max).exp().sum(-1).log() + row_max.squeeze(-1)
    squares = log_sum.square() if is_token is None else log_sum.square().where(is_token, 0.0)
    return squares.sum() / (tokens.clamp_min(1) if isinstance(tokens, Tensor) else tokens)


@contract
def with_loss(x: Sharded[Tensor, "..."], loss: Sharded[Tensor, ""]) -> Sharded[Tensor, "..."]:
    """Return x unchanged; backward through the result also adds the gradient of `loss`.

    A router computes its losses inside a model, and the model's loss L is computed elsewhere, in a pipeline on another
    rank. If L depends on any part of the result, backward of L gives the gradient of L + `loss`. The cotangent of
    `loss` is 1, so scale `loss` like L.

    Cost:   no collective. Saves nothing.
    Errors: TypeError for a wrong type; ValueError for a `loss` that is not a scalar; RuntimeError if the gradient
            is differentiated again.
    """
    return _WithLoss.apply(x, loss)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    @first_derivative_only  # a second backward through x would add the loss again
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        return cotangent, cotangent.new_ones((), dtype=ctx.dtype)


def _is_expert(experts: Tensor, size: int) -> Tensor:
    return (experts >= 0) & (experts < size)


def _is_token(experts: Tensor, size: int) -> Tensor:
    """Whether a row has an expert, [...] of experts [..., k]."""
    return _is_expert(experts, size).any(-1)


def _totals(experts: Tensor, size: int) -> Tensor:
    """The choices of each expert and the number of tokens, [b, e + 1] of experts [b, t, k]: one message sums both."""
    is_expert = _is_expert(experts, size)
    index = torch.where(is_expert, experts.long(), size).flatten(1)  # invalid ids map to e
    totals = index.new_zeros(len(experts), size + 1)
    totals.scatter_add_(1, index, torch.ones_like(index))
    totals[:, size] = is_expert.any(-1).sum(-1)
    return totals


def _loss(probabilities: Tensor, is_token: Tensor, totals: Tensor) -> Tensor:
    """e * sum_e f_e * (sum of the probabilities of e over this rank's tokens) / t, [b]; f and t come from `totals`."""
    wide = accumulator(probabilities.dtype)
    counts, tokens = totals[:, :-1], totals[:, -1].clamp_min(1)
    share = counts.to(wide) / counts.sum(-1, keepdim=True).clamp_min(1)
    sums = probabilities.where(is_token[..., None], 0.0).to(wide).sum(-2)
    return probabilities.shape[-1] * (share * sums).sum(-1) / tokens
