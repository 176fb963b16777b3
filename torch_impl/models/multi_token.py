"""Multi-token prediction: losses of tokens several places ahead, with one head for all depths.

Depth 0 is the model's own loss of the next token. The module of depth k >= 1 reads the embedding of the token k places
ahead and predicts the one after it; the mean of these losses over depths, times a coefficient, is added. A document's
last k tokens have no target at depth k, so each depth divides by a count of its own.

    tokens_ahead                of `vocab_parallel`: the input ids of each depth
    multi_token_targets         before the first forward of a step: targets and divisors of each depth
    multi_token_losses          for each microbatch: this rank's share of the loss, by depth
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torch_impl.contract import (
    Group,
    Groups,
    Instance,
    ListOf,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Rejected,
    Sharded,
    ShardedIds,
    ShardedInt,
    check,
    contract,
    dtype_name,
)
from torch_impl.contract.tensor_kinds import TensorKind
from torch_impl.layouts import TokenLayout
from torch_impl.models.loss import IGNORED, Aggregation, Targets, check_constant, loss_divisors, normalised
from torch_impl.vocab_parallel import ChunkedDistributedHiddenStatesToLogprobs, tokens_ahead
from torch_impl.vocab_parallel.vocab_range import ChunkSize, ceil_range

Layouts = Annotated[
    list[TokenLayout], ListOf(Instance(TokenLayout, "pass a TokenLayout", shows_value=False), "layouts")
]


@contract
def multi_token_targets(
    targets: Targets,
    layouts: Layouts,
    depth: NonNegativeInt,
    vocab_size: PositiveInt,
    aggregation: Aggregation,
    dp_groups: Groups,
    cp_group: Group[ProcessGroup, "cp"],
    *,
    constant: PositiveInt | Tensor = 1,
) -> list[tuple[ShardedInt[Tensor, "m b/dp t/cp:LAYOUT"], ShardedInt[Tensor, "m b/dp t/cp:LAYOUT"]]]:
    """The targets of depths 0 to `depth`, and the number that each token's loss is divided by, for each microbatch.

    `targets` has for each local microbatch the next tokens "b/dp t/cp:LAYOUT", shifted inside their documents, as
    `rank_stream` gives them: they are depth 0. At depth k a token has the target of the token k places after it in its
    document, and -100 if none follows. A target counts if it is in [0, vocab_size). Each depth has divisors of its own,
    from the targets that count at this depth in the full step; they are 0 for other tokens.

    `layouts` has a layout for each microbatch; ranks of `cp_group` have the same ones. A rank without a microbatch
    passes one of 0 rows. `aggregation`, `constant` and `dp_groups` are as in `loss_divisors`.

    Cost:   `loss_divisors` once for each depth, and `tokens_ahead` for each microbatch.
    Errors: as `loss_divisors` and `tokens_ahead`; ValueError unless there is a layout for each tensor of targets, which
            are int32 or int64 and "b t/cp".
    """
    # 1. Check everything before the first collective.
    check_constant(constant)
    if len(layouts) != len(targets):
        raise Rejected(f"layouts has {len(layouts)} for {len(targets)} targets; pass one for each microbatch")
    for i, (each, layout) in enumerate(zip(targets, layouts, strict=True)):
        check(TensorKind("b t", "ids"), f"targets[{i}]", each)
        if each.shape[1] != (rows := layout.counts[layout.cp_rank]):
            raise Rejected(f"targets[{i}] is {list(each.shape)} but its layout has {rows} local tokens; pass [b, t/cp]")
    # 2. Shift the targets inside each document.
    by_depth = [
        torch.cat([each[None], tokens_ahead(each, layout, cp_group, depth, IGNORED)]) if depth else each[None]
        for each, layout in zip(targets, layouts, strict=True)
    ]
    # 3. Count the remaining targets at each depth.
    divisors = [
        loss_divisors(
            [(each[k] >= 0) & (each[k] < vocab_size) for each in by_depth],
            aggregation,
            dp_groups,
            cp_group,
            layouts=layouts,
            constant=constant,
        )
        for k in range(depth + 1)
    ]
    return list(zip(by_depth, (torch.stack(each) for each in zip(*divisors, strict=True)), strict=True))


@contract
def multi_token_losses(
    hidden_states: Sharded[Tensor, "m b/dp t/cp:LAYOUT d tp=I"],
    output_weight: Sharded[Tensor, "v/tp d dp=R cp=R"],
    targets: ShardedIds[Tensor, "m b/dp t/cp:LAYOUT"],
    divisors: ShardedInt[Tensor, "m b/dp t/cp:LAYOUT"],
    tp_group: Group[ProcessGroup, "tp"],
    vocab_size: PositiveInt,
    *,
    coefficient: NonNegative = 0.3,
    averaged_over: PositiveInt = 1,
    chunk_size: ChunkSize | None = None,
) -> Sharded[Tensor, "m dp=P cp=P tp=I"]:
    """This rank's share of the loss of each depth, weighted; their sum is the loss.

        out[0] =                            sum of -log p(targets[0]) / divisors[0]
        out[k] = coefficient / (m - 1)  *   sum of -log p(targets[k]) / divisors[k],    1 <= k < m

    `hidden_states` are the normed states of depths 0 to m - 1, stacked, and `output_weight` is the head that all depths
    share: its rows of this rank, by DTensor's ceil rule. `targets` and `divisors` are a pair of `multi_token_targets`.
    p = softmax(h W^T), over the vocabulary of all ranks of `tp_group`. `averaged_over` is as for
    `normalised`, and `chunk_size` as for the function under Cost.

    All depths are one product with the head, so that its gradient, the sum over depths, is summed in float32 or wider
    and rounded once. Pass the embedding's weight for a tied head.

    Cost:   as `ChunkedDistributedHiddenStatesToLogprobs` for m * b * t/cp tokens: the same collectives for any m.
    Errors: TypeError for states or a weight that are not floating, targets that are not int32 or int64, divisors that
            are not integers, a group of another type; ValueError for no depth, unlike shapes or dtypes, a weight
            without this rank's rows, and a coefficient below 0.
    Source: arXiv 2412.19437, section 2.2 (equations 24 and 25).
    """
    if not len(targets):
        raise Rejected("targets has no depth; pass depth 0, the next tokens, or more")
    start, end = ceil_range(vocab_size, tp_group.size(), tp_group.rank())
    if len(output_weight) != end - start:
        rows = f"rank {tp_group.rank()} of tp={tp_group.size()} has {end - start} of vocab_size={vocab_size}"
        raise Rejected(f"output_weight has {len(output_weight)} rows but {rows}; pass this rank's rows")
    if output_weight.dtype != hidden_states.dtype:
        dtypes = f"output_weight is {dtype_name(output_weight)} but hidden_states are {dtype_name(hidden_states)}"
        raise Rejected(f"{dtypes}; convert one of them")
    # 1. Depths are further positions of one sequence.
    positions = hidden_states.transpose(1, 2).flatten(0, 1)  # [m * t, b, d]
    ids = targets.movedim(0, 1).flatten(1)  # [b, m * t]
    scores = ChunkedDistributedHiddenStatesToLogprobs.apply(
        positions, ids, output_weight, start, end, chunk_size, tp_group
    )
    losses = -scores.unflatten(1, (len(targets), targets.shape[2])).movedim(1, 0)
    # 2. Each depth's share, and its weight.
    weights = [1.0] + [coefficient / max(len(targets) - 1, 1)] * (len(targets) - 1)
    shares = [
        normalised(each, count, averaged_over) * weight
        for each, count, weight in zip(losses, divisors, weights, strict=True)
    ]
    return torch.stack(shares)
