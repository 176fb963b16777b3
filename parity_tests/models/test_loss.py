"""Parity of the loss, its count of tokens and the norm of its gradient."""

import re
from fractions import Fraction

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from jax_ref.models import Config, next_ids
from jax_ref.models import normalised as whole_normalised
from jax_ref.models import token_losses as whole_token_losses
from parity_tests.harness.run.engines import run
from parity_tests.models.by_name import flax_model
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
from shardproof import CaseSpec, check, every_case, integers, mask, offsets, scheme, token_below, values
from torch_impl.models import (
    IGNORED,
    Stream,
    gradient_norm,
    normalised,
    rank_stream,
    streams_of_rank,
    token_losses,
    valid_count,
)

# Two streams of unequal documents, padding inside; tokens whose prediction does not count.
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


def parallel_loss(mesh, streams, groups, parameters, **chosen):
    dp, cp = (mesh.size(axis) for axis in ("dp", "cp"))
    local_streams = [rank_stream(each, cp, mesh.rank("cp")) for each in streams_of_rank(streams, dp, mesh.rank("dp"))]
    count = valid_count([each.targets for each in local_streams], [mesh["dp"], mesh["cp"]])
    vocab_size = parameters["embed_tokens"]["weight"].shape[0] * mesh.size("tp")
    losses = [
        token_losses(
            rank_logits(mesh, each.ids, each.layout, parameters, groups, **chosen), each.targets, mesh["tp"], vocab_size
        )
        for each in local_streams
    ]
    everyone = [torch.zeros_like(losses[0][0]) for _ in streams]
    everyone[mesh.rank("dp") :: dp] = [each[0] for each in losses]
    loss = sum(normalised(each, count) for each in losses)
    return {"loss": loss, "first": everyone[0], "second": everyone[1]}


@scheme(
    mesh={"dp": (1, 2), "cp": (1, 2), "tp": (1, 2)},
    rank_options={"mamba": ("state", "hidden"), "exchange": ("ulysses", "ring", "all_gather")},
    reference=whole_loss,
    inputs={**STREAMS, "groups": "j", "parameters": specs(UNTIED, "dp=R cp=R")},
    outputs={"loss": "dp=P cp=P tp=I", "first": "t/cp:packed dp=P tp=I", "second": "o/cp:packed dp=P tp=I"},
    dims={**SIZES, **RELATED, "t": (16,), "o": "t", "q": (4,), "h": (4,), "g": (2,), "r": (4,), "j": (2,)},
    draw={**DRAW, **drawn(UNTIED)},
    dtypes=DTYPES,
    reduction=("t", "f"),
    roundings=ROUNDINGS,
)
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
):
    streams = [Stream(ids, cu_padded, cu_real, keep), Stream(other_ids, other_padded, other_real, other_keep)]
    return parallel_loss(mesh, streams, len(groups), parameters, mamba=mamba, exchange=exchange)


@settings(max_examples=8)
@given(every_case(hybrid_loss))
def test_parity(case):
    check(case)


def test_means_of_ranks_are_another_number():
    """Where ranks have unlike counts; the rule gives the same number however the tokens are sharded."""
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


@pytest.mark.parametrize("is_told", [True, False])
def test_a_target_outside_of_the_vocabulary_is_ignored(is_told):
    """To the bit: in the sum and in the count. One above is seen only where the size of the vocabulary is told."""
    logits = torch.linspace(-2, 3, 2 * 4 * 5, dtype=torch.float64).sin().view(2, 4, 5)
    targets = torch.tensor([[1, IGNORED, 4, -1], [-7, 0, IGNORED - 1, 5 if is_told else IGNORED]])
    inside = (targets >= 0) & (targets < 5)

    def body(mesh, case):
        def share(targets):
            mine = targets.tensor_split(2)[mesh.rank("dp")]
            count = valid_count([mine], [mesh["dp"]], *([5] if is_told else []))
            return normalised(token_losses(local, mine, mesh["tp"], 5), count).item(), count.item()

        local = logits.tensor_split(2)[mesh.rank("dp")].tensor_split([3], -1)[mesh.rank("tp")]
        return share(targets), share(torch.where(inside, targets, IGNORED))

    for outcome, want in run(body, CaseSpec(scheme="loss", mesh={"dp": 2, "tp": 2})).results:
        assert outcome == want and want[0] > 0 and want[1] == inside.sum()


def test_a_step_without_tokens_has_no_loss():
    assert normalised(torch.zeros(1, 4), torch.tensor(0)).item() == 0.0
    assert whole_normalised([jnp.zeros(4)], [jnp.zeros(4, bool)]) == 0.0


def whole_norm(gradients):
    return jnp.sqrt(sum((x**2).sum() for x in gradients.values()))


# How DTensor says that an axis of the mesh (dp, tp) shards or repeats each.
CUT = {"both": (Shard(0), Shard(1)), "rows": (Shard(0), Replicate()), "columns": (Replicate(), Shard(0))}


@scheme(
    reference=whole_norm,
    mesh={"dp": (1, 2, 3), "tp": (1, 2)},
    inputs={"gradients": {"both": "a/dp b/tp", "rows": "e/dp tp=I", "columns": "f/tp dp=I", "repeated": "o dp=I tp=I"}},
    outputs="dp=I tp=I",
    dims={"a": (6,), "b": (2,), "e": (6,), "f": (4,), "o": (1, 3)},
    draw={f"gradients.{name}": values("normal", "zeros", "ties") for name in (*CUT, "repeated")},
    nograd=tuple(f"gradients.{name}" for name in (*CUT, "repeated")),
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("a", "b", "e"),
)
def norm_of_cut_gradients(mesh, gradients):
    parameters = []
    for name, local in gradients.items():
        placements = list(CUT.get(name, (Replicate(), Replicate())))
        parameters.append(nn.Parameter(DTensor.from_local(torch.zeros_like(local), mesh.device_mesh, placements)))
        parameters[-1].grad = DTensor.from_local(local, mesh.device_mesh, placements)
    return gradient_norm(parameters)


@settings(max_examples=20)
@given(every_case(norm_of_cut_gradients))
def test_parity_of_the_norm(case):
    check(case)


# Squares of integers add up exactly, in any order.
GRADIENTS = [torch.arange(-4.0, 8.0).view(6, 2), torch.arange(5.0), torch.tensor([[3.0]])]
SQUARE = sum(Fraction(float(each.square().sum())) for each in GRADIENTS)


def parameter(gradient, mesh, placements):
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = distribute_tensor(gradient.clone(), mesh, placements)  # a broadcast writes it
    return parameter


@pytest.mark.parametrize(
    "placements",
    [
        [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())],
        [(Replicate(), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate())],
    ],
)
@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}])
def test_what_is_sharded_is_summed_and_what_is_replicated_is_not(mesh, placements):
    def body(mesh, case):
        cut = [parameter(x, mesh.device_mesh, list(p)) for x, p in zip(GRADIENTS, placements, strict=True)]
        plain, without = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        plain.grad = torch.tensor([0.0, 2.0])
        return gradient_norm([*cut, plain, without]).item()

    outcome = run(body, CaseSpec(scheme="norm", mesh=mesh)).results
    assert set(outcome) == {torch.tensor(float(SQUARE + 4)).sqrt().item()}


def test_equal_meshes_are_one():
    """DTensor's caches may give a gradient either of two equal meshes, not the same on every rank."""

    def body(mesh, case):
        again = init_device_mesh(mesh.device_mesh.device_type, (2,), mesh_dim_names=("dp",))
        places = [mesh.device_mesh, again if mesh.rank("dp") else mesh.device_mesh]
        return gradient_norm([parameter(torch.ones(4), place, [Shard(0)]) for place in places]).item()

    outcome = run(body, CaseSpec(scheme="norm", mesh={"dp": 2}))
    assert set(outcome.results) == {torch.tensor(8.0).sqrt().item()}
    assert sum(row.op == "all_reduce" for row in outcome.ledger.of(0)) == 1


def test_partial_sums_are_rejected():
    def body(mesh, case):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh.device_mesh, [Replicate()]))
        parameter.grad = DTensor.from_local(torch.ones(2), mesh.device_mesh, [Partial()])
        with pytest.raises(ValueError, match=re.escape("a gradient is (Partial(sum),); reduce it first")):
            gradient_norm([parameter])

    run(body, CaseSpec(scheme="norm", mesh={"tp": 2}))


def test_narrow_gradients_are_summed_wide():
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert gradient_norm([parameter]).item() == 64.0
