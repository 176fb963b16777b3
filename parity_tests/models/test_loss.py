"""Parity of the loss and its count of tokens."""

import jax.numpy as jnp
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from jax_ref.models import Config, next_ids
from jax_ref.models import normalised as whole_normalised
from jax_ref.models import token_losses as whole_token_losses
from parity_tests.models.parameters import (
    DTYPES,
    HEAD_DIM,
    RELATED,
    ROUNDINGS,
    SIZES,
    UNTIED,
    config_of,
    drawn,
    rank_logits,
    specs,
)
from shardproof import CaseSpec, integers, mask, offsets, scheme, token_below, values
from shardproof.engines.engines import run
from shardproof.training.by_name import flax_model
from torch_impl.collectives import accumulator
from torch_impl.models import (
    IGNORED,
    Stream,
    normalised,
    rank_stream,
    streams_of_rank,
    token_losses,
    valid_count,
)

# Two streams of unequal documents with padding inside; `keep` marks the tokens that count in the loss.
STREAMS = {
    **{"ids": "t", "cu_padded": "q", "cu_real": "q", "keep": "t"},
    **{"other_ids": "o", "other_padded": "q", "other_real": "q", "other_keep": "o"},
}
DRAW = {
    **{"ids": token_below("v"), "cu_padded": offsets("t", padded=True), "cu_real": offsets("t"), "keep": mask("t")},
    **{"other_ids": token_below("v"), "other_padded": offsets("o", padded=True), "other_real": offsets("o")},
    **{"other_keep": mask("o"), "groups": integers(0, 0)},
}


def whole_loss(ids, cu_padded, cu_real, keep, other_ids, other_padded, other_real, other_keep, groups, parameters):
    model = flax_model(Config(**config_of({"p": HEAD_DIM, "j": len(groups), "tp": 1}, parameters)), parameters)
    losses, counted = [], []
    for row in ((ids, cu_padded, cu_real, keep), (other_ids, other_padded, other_real, other_keep)):
        targets, is_there = next_ids(*row[:3])
        counted.append(is_there & row[3])
        losses.append(whole_token_losses(model(row[0][None], *row[1:3])[0], targets, counted[-1]))
    return {"loss": whole_normalised(losses, counted), "first": losses[0], "second": losses[1]}


def parallel_loss(mesh, streams, groups, parameters, ignored, **chosen):
    """Tokens that do not count get the target `ignored` if that is negative, and else a target so far above v."""
    dp, cp = (mesh.size(axis) for axis in ("dp", "cp"))
    local_streams = [rank_stream(each, cp, mesh.rank("cp")) for each in streams_of_rank(streams, dp, mesh.rank("dp"))]
    vocab_size = parameters["embed_tokens"]["weight"].shape[0] * mesh.size("tp")
    outside = ignored if ignored < 0 else vocab_size + ignored
    targets = [torch.where(each.targets == IGNORED, outside, each.targets) for each in local_streams]
    count = valid_count(targets, [mesh["dp"], mesh["cp"]], *([vocab_size] if ignored >= 0 else []))
    losses = [
        token_losses(
            rank_logits(mesh, each.ids, each.layout, parameters, groups, **chosen), of_stream, mesh["tp"], vocab_size
        )
        for each, of_stream in zip(local_streams, targets, strict=True)
    ]
    # A zero with a graph: if one stream alone has a cotangent, the others' ranks run backward, and recompute, too.
    everyone = [0 * losses[0][0] for _ in streams]
    everyone[mesh.rank("dp") :: dp] = [each[0] for each in losses]
    loss = sum(normalised(each, count) for each in losses)
    return {"loss": loss, "first": everyone[0], "second": everyone[1]}


@scheme(
    mesh={"dp": (1, 2), "cp": (1, 2), "tp": (1, 2)},
    rank_options={
        "mamba": ("state", "hidden"),
        "exchange": ("ulysses", "ring", "all_gather"),
        "ignored": (IGNORED, -1, 0, 5),
    },
    reference=whole_loss,
    inputs={**STREAMS, "groups": "j", "parameters": specs(UNTIED, "dp=R cp=R")},
    outputs={"loss": "dp=P cp=P tp=I", "first": "t/cp:packed dp=P tp=I", "second": "o/cp:packed dp=P tp=I"},
    dims={**SIZES, **RELATED, "t": (16,), "o": "t", "q": (4,), "h": (4,), "g": (2,), "r": (4,), "j": (2,)},
    draw={**DRAW, **drawn(UNTIED)},
    dtypes=DTYPES,
    reduction=("t", "f"),
    roundings=ROUNDINGS,
)
@pytest.mark.cases(8)
def hybrid_loss(
    mesh,
    ids,
    cu_padded,
    cu_real,
    keep,
    other_ids,
    other_padded,
    other_real,
    other_keep,
    groups,
    parameters,
    mamba,
    exchange,
    ignored,
):
    streams = [Stream(ids, cu_padded, cu_real, keep), Stream(other_ids, other_padded, other_real, other_keep)]
    return parallel_loss(mesh, streams, len(groups), parameters, ignored, mamba=mamba, exchange=exchange)


@scheme(
    reference=lambda ids: ids,
    mesh={"dp": (1, 2, 3)},
    inputs={"ids": "n t"},
    outputs="n/dp:striped t",
    draw={"ids": integers(0, 1000)},
    dims={"n": (6,), "t": (1, 3)},
)
@pytest.mark.cases(6)
def streams_in_turn(mesh, ids: Int[Tensor, "n t"]) -> Int[Tensor, "n t"]:
    """Rank r of dp has every dp-th stream of the batch, beginning with stream r."""
    ends = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    local_streams = streams_of_rank([Stream(row, ends, ends) for row in ids], mesh.size("dp"), mesh.rank("dp"))
    return torch.stack([stream.ids for stream in local_streams])


def mean_of_valid(losses, targets, vocab_size):
    is_valid = (targets >= 0) & (targets < vocab_size)
    return jnp.where(is_valid, losses, 0.0).sum() / jnp.maximum(is_valid.sum(), 1).astype(losses.dtype)


@scheme(
    reference=mean_of_valid,
    mesh={"dp": (1, 2, 3), "cp": (1, 2)},
    inputs={"losses": "b/dp s/cp", "targets": "b/dp s/cp"},
    outputs="dp=P cp=P",
    draw={"losses": values("positive", "normal", "huge"), "targets": integers(-2, 6)},
    options={"vocab_size": (6, 3)},
    dtypes=("bfloat16", "float32", "float64"),
    sums="float32",
    reduction=("b", "s"),
)
@pytest.mark.cases(20)
def mean_of_valid_tokens(mesh, losses, targets: Int[Tensor, "b s"], vocab_size):
    """A loss is 0 where its target does not count, as `token_losses` returns it."""
    count = valid_count([targets], [mesh["dp"], mesh["cp"]], vocab_size)
    share = normalised(losses.masked_fill((targets < 0) | (targets >= vocab_size), 0.0), count)
    assert share.dtype == accumulator(losses.dtype)  # shares of ranks and micro-batches are added up
    return share


def test_the_mean_of_the_ranks_means_differs_from_the_loss():
    """Ranks have different counts of tokens; the loss is the same for every sharding of them."""
    losses = torch.arange(6.0, dtype=torch.float64)
    targets = torch.tensor([1, IGNORED, 1, IGNORED, IGNORED, 1])

    def body(mesh, case):
        dp, rank = mesh.size("dp"), mesh.rank("dp")
        local, mine = losses.tensor_split(dp)[rank], targets.tensor_split(dp)[rank]
        counted = local * (mine != IGNORED)
        count = valid_count([mine], [mesh["dp"]])
        averaged = normalised(counted, count, averaged_over=dp)
        return (
            float(normalised(counted, count)),
            float(averaged),
            float(counted.sum() / (mine != IGNORED).sum()),
            int(count),
        )

    outcome = {dp: run(body, CaseSpec(scheme="loss", mesh={"dp": dp})).results for dp in (1, 2, 3)}
    assert {dp: sum(each[0] for each in ranks) for dp, ranks in outcome.items()} == dict.fromkeys((1, 2, 3), 7 / 3)
    assert {dp: sum(each[1] for each in ranks) / dp for dp, ranks in outcome.items()} == dict.fromkeys((1, 2, 3), 7 / 3)
    assert sum(each[2] for each in outcome[2]) / 2 == 3.0
    assert {each[3] for ranks in outcome.values() for each in ranks} == {3}


@pytest.mark.parametrize("has_count", [True, False])
def test_a_target_outside_of_the_vocabulary_is_ignored(has_count):
    """Bitwise, in the sum and in the count. A target above the vocabulary needs the argument vocab_size."""
    logits = torch.linspace(-2, 3, 2 * 4 * 5, dtype=torch.float64).sin().view(2, 4, 5)
    targets = torch.tensor([[1, IGNORED, 4, -1], [-7, 0, IGNORED - 1, 5 if has_count else IGNORED]])
    inside = (targets >= 0) & (targets < 5)

    def body(mesh, case):
        def share(targets):
            mine = targets.tensor_split(2)[mesh.rank("dp")]
            count = valid_count([mine], [mesh["dp"]], *([5] if has_count else []))
            return normalised(token_losses(local, mine, mesh["tp"], 5), count).item(), count.item()

        local = logits.tensor_split(2)[mesh.rank("dp")].tensor_split([3], -1)[mesh.rank("tp")]
        return share(targets), share(torch.where(inside, targets, IGNORED))

    for outcome, want in run(body, CaseSpec(scheme="loss", mesh={"dp": 2, "tp": 2})).results:
        assert outcome == want and want[0] > 0 and want[1] == inside.sum()


@pytest.mark.slow
def test_a_step_without_tokens_has_no_loss():
    assert normalised(torch.zeros(1, 4), torch.tensor(0)).item() == 0.0
    assert whole_normalised([jnp.zeros(4)], [jnp.zeros(4, bool)]) == 0.0
