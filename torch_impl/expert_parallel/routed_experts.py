"""Routed experts sharded over ep and tp, and shared experts sharded over tp.

Every rank has tokens of its own. Rank r of ep has e/ep experts, from r * e/ep on, and rank s of tp has f/tp columns of
each. Ranks without tokens, experts without rows and one expert with all rows run the same lines.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.collectives import accumulator, convert
from torch_impl.collectives.gathers import gather_rows, reduce_scatter_rows
from torch_impl.collectives.plain import all_gather_concat, all_gather_stack
from torch_impl.contract import Group, OneOf, Rejected, Sharded, ShardedBool, ShardedInt, contract
from torch_impl.expert_parallel.dispatch import SortedChoices, destinations, messages_of, sorted_choices
from torch_impl.expert_parallel.experts import Activation, ExpertWeights, GroupedBackend, checked_weights

EXCHANGES = ("all_to_all", "all_gather")
ExchangeName = Annotated[Literal["all_to_all", "all_gather"], OneOf(EXCHANGES)]


# Gradient types: V -> V.
@contract
def routed_experts(
    x: Sharded[Tensor, "t/ep/tp d"],
    gates: Sharded[Tensor, "t/ep/tp k"],
    experts: ShardedInt[Tensor, "t/ep/tp k"],
    gate_up: Sharded[Tensor, "e/ep d 2f/tp"],
    down: Sharded[Tensor, "e/ep f/tp d"],
    ep_group: Group[ProcessGroup, "ep"],
    tp_group: Group[ProcessGroup, "tp"] | None = None,
    *,
    kept: ShardedBool[Tensor, "t/ep/tp k"] | None = None,
    exchange: ExchangeName = "all_to_all",
    backend: GroupedBackend = "auto",
    gate_up_bias: Sharded[Tensor, "e/ep 2f/tp"] | None = None,
    down_bias: Sharded[Tensor, "e/ep d tp=I"] | None = None,
    activation: Activation | None = None,
) -> Sharded[Tensor, "t/ep/tp d"]:
    """The sum of the experts' outputs for each token, weighted by its gates, with the experts sharded over ep.

    y[t] = sum_j gates[t, j] * expert(x[t]; experts[t, j]),     expert(x) = (silu(x A) * (x B)) C

    A and B are the two halves of this rank's columns of gate_up, C is `down`; the gate multiplies the f columns that C
    is applied to. Ranks may have different numbers of tokens t. A choice counts as 0 and is not sent if `kept` is False
    or its id is not an expert's, such as -1 for padding. Without `tp_group` each expert has all its f columns; with it
    tokens are sharded over tp too, as sequence parallelism leaves them, and no token is sent twice. `exchange` is one
    of the two below, whose results differ by rounding only; `fewest_exchange_bytes` tells which sends less. `backend`
    is as in `grouped_product`. Gates have any floating dtype and are sent in float32 or wider.

    With biases a = `gate_up_bias` and c = `down_bias` an expert is (silu(x A + a) * (x B + b)) C + c. Over tp c is
    replicated and added once, and each rank gets its full gradient: sum it over edp, as the weights'. `activation`
    replaces SwiGLU; gpt-oss has both biases and `ClampedSwiGLU()`, for which columns of gate and up alternate.

    All ranks, including ranks without tokens, must agree on which arguments require a gradient. Gradients are for this
    rank's tokens and weights. `sum_layer_gradients` adds them up over edp, the ranks that replicate an expert.

    Cost:   with n = ep ranks; tokens, and the sums of all_to_all, are in the dtype of x.
        all_to_all  a token is sent once to each rank with any of its experts: 1 all_to_all of 2n counts, 1 of these
                    rows, 1 of their gates, 1 of their choices, 1 of a sum for each row back; over tp 1 all_gather of
                    counts, 1 of rows, of gates and of choices, and 1 reduce_scatter. Backward no counts, no choices.
        all_gather  over ep, and over tp before it: 1 all_gather of t, of x, of the gates and of the experts, and 1
                    reduce_scatter of all tokens in float32 or wider. Gradients of the gates are reduce_scattered too.
        Saves the rows of this rank's experts and 5 f columns of each, 4 f of them in float32 or wider; with a down_bias
        also d columns of each. Biases are not sent.
    Errors: TypeError for a wrong type or dtypes that differ; ValueError for shapes that do not fit, different devices,
            gate_up without twice as many columns as down has rows, an unknown exchange, or a backend that cannot run.
    Source: arXiv 2006.16668 (GShard), 2211.15841 (MegaBlocks, dropless), 2508.10925 (gpt-oss).
    """
    if down_bias is not None and tp_group is not None:
        # Each tp rank has a term of an expert's output; the bias is a whole one.
        down_bias = convert(down_bias, tp_group, src="I", dst="P")
    weights = checked_weights(x, gate_up, down, backend, gate_up_bias, down_bias, activation)
    if experts.shape[1] == 0:
        raise Rejected("experts has k=0 choices of a token; pass one or more")
    # Wide, so that a gate's gradient, a sum over ranks, is rounded once.
    gates = gates.to(torch.promote_types(gates.dtype, accumulator(x.dtype)))
    # Expert ids are sent in int32; clamping keeps invalid ids, such as -1, invalid.
    chosen = experts.long().clamp(-1, ep_group.size() * len(down)).int()
    if kept is not None:
        chosen = torch.where(kept, chosen, -1)
    mixture = _by_all_to_all if exchange == "all_to_all" else _by_all_gather
    return mixture(x, gates, chosen, weights, ep_group, tp_group)


# Gradient types: V -> V.
@contract
def shared_experts(
    x: Sharded[Tensor, "t/tp d"],
    gate_up: Sharded[Tensor, "d 2f/tp"],
    down: Sharded[Tensor, "f/tp d"],
    tp_group: Group[ProcessGroup, "tp"] | None = None,
    *,
    backend: GroupedBackend = "auto",
) -> Sharded[Tensor, "t/tp d"]:
    """The output of the shared expert, which takes every token. Pass several as one, with their columns side by side.

    y[t] = (silu(x[t] A) * (x[t] B)) C, where A and B are the two halves of this rank's columns of gate_up and C is
    `down`. Nothing is sent over ep: every rank has these weights, and `sum_layer_gradients` sums their gradients over
    all ranks that have other tokens. `backend` is as in `grouped_product`.

    Cost:   none without tp_group; with it 1 all_gather of t and 1 of x, and 1 reduce_scatter of all tp ranks' tokens;
            the same backward, without t. Saves x and its 2f and f columns.
    Errors: TypeError for a wrong type or dtypes that differ; ValueError for shapes that do not fit or a backend that
            cannot run.
    Source: arXiv 2401.06066 (DeepSeekMoE).
    """
    weights = checked_weights(x, gate_up[None], down[None], backend)
    lengths = _lengths(x, tp_group)
    full = x if tp_group is None else gather_rows(x, tp_group, lengths, "R")
    count = torch.tensor([len(full)], device=x.device)
    y = weights.outputs(full, count)
    return y if tp_group is None else reduce_scatter_rows(y, tp_group, lengths)


def _by_all_to_all(
    x: Tensor, gates: Tensor, chosen: Tensor, weights: ExpertWeights, ep: ProcessGroup, tp: ProcessGroup | None
) -> Tensor:
    """Send each token once to each rank of its experts, and return the sum of the experts' outputs."""
    # 1. Send tokens, gates and choices to the ranks of the experts.
    targets, counts = destinations(chosen, ep.size(), len(weights.down))
    messages = messages_of(counts, ep, tp)
    targets = targets.first(sum(messages.to_ranks))
    there = [messages.dispatched(targets.rows(each), ep, tp) for each in (x, gates, chosen)]
    # 2. Run the experts there, and add up a token's sums from all ranks that it was sent to.
    choices = _local_choices(there[2], weights, ep).first(messages.choices)
    sums = weights.sums(there[0], there[1], choices, x.dtype)
    return targets.sums(messages.returned(sums, ep, tp))


def _by_all_gather(
    x: Tensor, gates: Tensor, chosen: Tensor, weights: ExpertWeights, ep: ProcessGroup, tp: ProcessGroup | None
) -> Tensor:
    """Gather all tokens on every rank, sum the outputs of the rank's experts, and reduce_scatter the sums."""
    # 1. Gather tokens, gates and choices over tp, then over ep.
    axes = [group for group in (tp, ep) if group is not None]
    shards, full_x, full_gates = [], x, gates
    for group in axes:
        lengths = _lengths(full_x, group)
        full_x = gather_rows(full_x, group, lengths, "R")
        full_gates = gather_rows(full_gates, group, lengths, "R")
        chosen = all_gather_concat(chosen, group, 0, lengths)
        shards.append((group, lengths))
    # 2. Run this rank's experts.
    choices = _local_choices(chosen, weights, ep)
    choices = choices.first(int(choices.counts.sum()))
    y = weights.sums(full_x, full_gates, choices, accumulator(x.dtype))
    # 3. Sum over the ranks onto each token's rank, in the reverse order.
    for group, lengths in reversed(shards):
        y = reduce_scatter_rows(y, group, lengths)
    return y.to(x.dtype)


def _local_choices(chosen: Tensor, weights: ExpertWeights, ep: ProcessGroup) -> SortedChoices:
    """The choices of this rank's experts, sorted by expert, then all others."""
    local = len(weights.down)
    return sorted_choices(chosen, local, first=ep.rank() * local)


def _lengths(x: Tensor, group: ProcessGroup | None) -> list[int]:
    """The number of tokens on each rank of the group; without a group, the tokens of x."""
    if group is None:
        return [len(x)]
    return all_gather_stack(torch.tensor(len(x), device=x.device), group).tolist()
