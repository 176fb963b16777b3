"""Parity of models.staged: a step of the model in stages is the step of the full model, by every schedule."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import skip_init

from jax_ref.models import Config, next_ids, normalised, token_losses
from parity_tests.models.parameters import (
    DTYPES,
    FOUR_TIED,
    HEAD_DIM,
    RELATED,
    ROUNDINGS,
    SIZES,
    UNTIED,
    config_of,
    drawn,
    specs,
)
from parity_tests.models.staged_gradients import in_stages, staged_loss
from parity_tests.parallelizer.styled import ceil_rule
from shardproof import CaseSpec, check, every_case, integers, offsets, scheme, token_below, values
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from shardproof.experiments.undecided import CHOICE, verify_or_undecided
from shardproof.training.by_name import flax_model
from shardproof.verify_one_case import verify_case
from torch_impl.models import (
    HybridConfig,
    HybridLM,
    Placement,
    StepLoss,
    Stream,
    rank_stream,
    staged_step,
    tensor_parallel_plan,
)
from torch_impl.optimizers import gradient_norm
from torch_impl.pipelining.functional import split_model_into_stages
from torch_impl.pipelining.tied_weights import distinct_parameters

# Two streams with documents of their own, unlike in number, so that every micro-batch has another layout.
STREAMS = {
    **{"ids": "t", "cu_padded": "q", "cu_real": "q"},
    **{"other_ids": "o", "other_padded": "fewer", "other_real": "fewer"},
}
DRAW = {
    **{"ids": token_below("v"), "cu_padded": offsets("t", padded=True), "cu_real": offsets("t")},
    **{"other_ids": token_below("v"), "other_padded": offsets("o", padded=True), "other_real": offsets("o")},
    "groups": integers(0, 0),
}
SIZES_OF_STAGES = SIZES | RELATED | {"t": (16,), "o": "t", "q": (4,), "fewer": (3,)}
SIZES_OF_STAGES |= {"h": (4,), "g": (2,), "r": (4,), "j": (2,)}
Returned = tuple[Float[Tensor, ""], Int[Tensor, " l"], Int[Tensor, " l"]]


def reference_loss(ids, cu_padded, cu_real, other_ids, other_padded, other_real, groups, parameters):
    """The loss of both streams, and their ids."""
    model = flax_model(Config(**config_of({"p": HEAD_DIM, "j": len(groups), "tp": 1}, parameters)), parameters)

    def of_one(row, padded, real):
        targets, is_there = next_ids(row, padded, real)
        return token_losses(model(row[None], padded, real)[0], targets, is_there), is_there

    empty = (0, len(cu_padded) - len(other_padded))  # documents without tokens, up to as many
    padded, real = (jnp.pad(each, empty, mode="edge") for each in (other_padded, other_real))
    pairs = ((ids, other_ids), (cu_padded, padded), (cu_real, real))
    losses, counted = jax.vmap(of_one)(*(jnp.stack(pair) for pair in pairs))
    return normalised(list(losses), list(counted)), ids, other_ids


# A step has a backward of its own, so that nobody computes it again; torch's own operations follow autocast.
OF_STEPS = ("inference_mode", "autocast", "recomputed")


def declared(parameters, names, **changes):
    return {
        "reference": reference_loss,
        "mesh": {"pp": (1, 2), "cp": (1, 2), "tp": (1,)},
        "inputs": {**STREAMS, "groups": "j", "parameters": specs(parameters, "pp=R cp=R")},
        "outputs": ("pp=P cp=P tp=I", "t/cp:packed", "o/cp:packed"),
        "dims": SIZES_OF_STAGES,
        "draw": {**DRAW, **drawn(parameters)},
        "rank_options": {
            "schedule": names,
            "mamba": ("state", "hidden"),
            "exchange": ("ulysses", "ring", "all_gather"),
        },
        "dtypes": DTYPES,
        "reduction": ("t", "f"),
        "roundings": 2 * ROUNDINGS,
        "excluded_conditions": OF_STEPS,
        **changes,
    }


def parallel(mesh, streams, groups, parameters, **chosen):
    local_streams = [rank_stream(each, mesh.size("cp"), mesh.rank("cp")) for each in streams]
    return (
        staged_loss(mesh, local_streams, parameters, len(groups), **chosen),
        local_streams[0].ids[0],
        local_streams[1].ids[0],
    )


@scheme(**declared(FOUR_TIED, ("ZBVZeroBubble", "1F1B", "Interleaved1F1B", "LoopedBFS")))
def tied_hybrid_in_stages(
    mesh, ids, cu_padded, cu_real, other_ids, other_padded, other_real, groups, parameters, schedule, mamba, exchange
) -> Returned:
    streams = [Stream(ids, cu_padded, cu_real), Stream(other_ids, other_padded, other_real)]
    return parallel(mesh, streams, groups, parameters, schedule=schedule, mamba=mamba, exchange=exchange)


IN_CEIL_SHARDS = {name: spec.replace("v/tp", "v/tp:ceil") for name, spec in UNTIED.items()}
OVER_TP = {  # which does not divide the vocabulary
    "mesh": {"pp": (1, 2), "cp": (1, 2), "tp": (1, 2)},
    "layouts": {"ceil": ceil_rule},
    "inputs": {**STREAMS, "groups": "j", "parameters": specs(IN_CEIL_SHARDS, "pp=R cp=R")},
    "dims": SIZES_OF_STAGES | {"v": (13,)},
}


@scheme(**declared(UNTIED, ("1F1B", "GPipe"), **OVER_TP))
def hybrid_in_stages(
    mesh, ids, cu_padded, cu_real, other_ids, other_padded, other_real, groups, parameters, schedule, mamba, exchange
) -> Returned:
    streams = [Stream(ids, cu_padded, cu_real), Stream(other_ids, other_padded, other_real)]
    return parallel(mesh, streams, groups, parameters, schedule=schedule, mamba=mamba, exchange=exchange)


@pytest.mark.parametrize("of", [tied_hybrid_in_stages, hybrid_in_stages], ids=lambda of: of.name)
def test_parity(of):
    @settings(max_examples=few(6))
    @given(every_case(of))
    def checked(case):
        check(case)

    checked()


@pytest.mark.slow
def test_a_norm_that_comes_near_to_0_by_rounding_is_undecided_in_bfloat16():
    """The mixer's norm divides by it: the gradient grows by more than any derivative says, from one float64 too."""
    case = tied_hybrid_in_stages.case(seed=324, dtype="bfloat16")
    assert verify_case(tied_hybrid_in_stages, case).verdict == "mismatch"
    assert verify_or_undecided(tied_hybrid_in_stages, case).undecided_reason == CHOICE


class Tied(nn.Module):
    """The least that has stages and a weight that two of them share."""

    def __init__(self, table, first, second):
        super().__init__()
        self.embed_tokens = nn.Embedding(*table.shape, _weight=torch.zeros_like(table))
        self.layers = nn.ModuleList(skip_init(nn.Linear, 2, 2, bias=False, dtype=x.dtype) for x in (first, second))
        self.lm_head = skip_init(nn.Linear, *reversed(table.shape), bias=False, dtype=table.dtype)
        self.lm_head.weight = self.embed_tokens.weight


@scheme(
    reference=lambda table, first, second: jnp.sqrt(sum((x**2).sum() for x in (table, first, second))),
    mesh={"pp": (1, 2)},
    inputs={"table": "v d pp=I", "first": "d e pp=I", "second": "d e pp=I"},
    outputs="pp=I",
    dims={"v": (3,), "d": (2,), "e": (2,)},
    draw={name: values("normal", "zeros") for name in ("table", "first", "second")},
    nograd=("table", "first", "second"),
    dtypes=("float32", "bfloat16", "float64"),
    reduction=("v", "d", "e"),
    sums="float32",
)
@pytest.mark.cases(10)
def norm_over_stages(mesh, table, first, second):
    """Both copies of a parameter that stages share have its gradient, as after a step; it counts once."""
    place = torch.device(mesh.device_mesh.device_type)
    schedule = {1: "LoopedBFS", 2: "1F1B"}[mesh.size("pp")]
    stages, parts = split_model_into_stages(
        Tied(table, first, second).to(place), mesh.device_mesh, "pp", schedule, place, layers_per_stage=1
    )
    gradients = {"embed_tokens": table, "lm_head": table, "layers.0": first, "layers.1": second}
    for part in parts:
        for name, parameter in part.named_parameters():
            parameter.grad = gradients[name.removesuffix(".weight")]
    return gradient_norm(distinct_parameters(stages).values(), pp=mesh["pp"])


SMALL = HybridConfig(vocab_size=12, hidden_size=4, num_attention_heads=2, num_key_value_heads=2, head_dim=2)


def streams_of(*lengths):
    return [
        rank_stream(Stream(torch.arange(n) % 12, *[torch.tensor([0, n], dtype=torch.int32)] * 2), 1, 0) for n in lengths
    ]


@pytest.mark.parametrize(("tp", "vocab_size"), [(1, 12), (2, 12), (2, 13)])
def test_a_stage_tells_the_shapes_that_it_has(tp, vocab_size):
    def body(mesh, case):
        model = HybridLM(replace(SMALL, vocab_size=vocab_size), Placement(mesh["cp"], mesh["tp"]))
        parallelize_module(model, mesh.device_mesh["tp"], tensor_parallel_plan(SMALL.layers))
        (stream,) = streams_of(8)
        (entering,), (leaving,) = model.get_pipeline_stage_metas(True, 1, 8, torch.float32)
        logits = model(stream.ids, stream.layout)
        hidden = model.get_pipeline_stage_metas(False, 1, 8, torch.float32)[0][0]
        assert (entering.shape, entering.dtype) == (stream.ids.shape, stream.ids.dtype)
        assert (leaving.shape, leaving.dtype, leaving.requires_grad) == (logits.shape, logits.dtype, True)
        assert hidden.shape == (1, 8, SMALL.hidden_size)
        model.lm_head = None
        (leaving,) = model.get_pipeline_stage_metas(False, 1, 8, torch.float32)[1]
        assert leaving.shape == model(stream.ids, stream.layout).shape

    run(body, CaseSpec("staged", {"cp": 1, "tp": tp}))


def test_each_step_counts_its_own_tokens():
    """A step after one of more tokens has the losses that it has alone."""

    def body(mesh, case):
        ids, padded, real = torch.arange(8) % 12, *(torch.tensor([0, n], dtype=torch.int32) for n in (8, 3))
        short = [rank_stream(Stream(ids, padded, real), 1, 0)] * 2
        losses = []
        for steps in ([short], [streams_of(8, 8), short]):
            torch.manual_seed(0)
            model = HybridLM(SMALL, Placement(mesh["cp"], mesh["tp"]))
            schedule, loss, stages = in_stages(mesh, model, short, "GPipe")
            losses += [[staged_step(schedule, stages, loss, streams, [mesh["cp"]]) for streams in steps][-1]]
        return [torch.stack(each) for each in losses]

    ((alone, after),) = run(body, CaseSpec("staged", {"pp": 1, "cp": 1, "tp": 1})).results
    assert torch.equal(alone, after)


def test_replicas_of_a_batch_leave_the_loss_and_router_losses():
    """The ranks' shares add up to the same loss if dp repeats the batch, with cp sharding it."""
    config = replace(SMALL, layers=("moe",), balance_coefficient=0.5, z_coefficient=0.25)

    def body(mesh, case):
        torch.manual_seed(0)
        model = HybridLM(config, Placement(mesh["cp"], mesh["tp"]), dtype=torch.float64)
        padded, real = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 4, 12], [0, 3, 10]))
        stream = Stream(torch.arange(12), padded, real)
        streams = [rank_stream(stream, mesh.size("cp"), mesh.rank("cp"))] * 2
        schedule, loss, stages = in_stages(mesh, model, streams, "GPipe")
        return torch.stack(staged_step(schedule, stages, loss, streams, [mesh["dp"], mesh["cp"]]))

    losses = []
    for dp in (1, 2):
        shares = torch.stack(run(body, CaseSpec("staged", {"dp": dp, "pp": 1, "cp": 2, "tp": 1})).results)
        losses.append(shares.unflatten(0, (dp, 2)).sum(1).sum(0))
    assert len(losses[0]) == 4  # of each micro-batch a loss of tokens and one of the router
    assert torch.equal(*losses)  # exactly: the shares of two replicas are halves


def test_rejections():
    def body(mesh, case):
        model = HybridLM(SMALL, Placement(mesh["cp"], mesh["tp"]))
        with pytest.raises(ValueError) as no_count:
            StepLoss(mesh["tp"], 12)(torch.zeros(1, 4, 12), torch.zeros(1, 4, dtype=torch.int64))
        with pytest.raises(ValueError) as rows:
            model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(2, 2, 3, dtype=torch.int32))
        with pytest.raises(TypeError) as kind:
            model(torch.zeros(1, 4, dtype=torch.int64), [0, 4])
        schedule, loss, stages = in_stages(mesh, model, streams_of(8, 8), "GPipe")
        with pytest.raises(ValueError) as lengths:
            staged_step(schedule, stages, loss, streams_of(8, 12), [mesh["cp"]])
        return [str(each.value) for each in (no_count, rows, kind, lengths)]

    (outcome,) = run(body, CaseSpec("staged", {"pp": 1, "cp": 1, "tp": 1})).results
    assert outcome == [
        "models.StepLoss: count is None; set it to the valid_count of the step first",
        "models.layout_of: offsets is [2, 2, 3]; pass [1, 2, q] for one stream",
        "models.layout_of: offsets is a list; pass a TokenLayout or its offsets",
        "models.staged_step: streams have [8, 12] tokens on this rank; pad them to one length",
    ]


def test_unlike_lengths_on_one_rank_are_rejected_on_every():
    def body(mesh, case):
        model = HybridLM(SMALL, Placement(mesh["cp"], mesh["tp"]))
        schedule, loss, stages = in_stages(mesh, model, streams_of(8, 8), "GPipe")
        local_streams = streams_of(8, 12) if mesh.rank("dp") == 1 else streams_of(8, 8)
        with pytest.raises(ValueError) as caught:
            staged_step(schedule, stages, loss, local_streams, [mesh["dp"], mesh["cp"]])
        return str(caught.value)

    first, second = run(body, CaseSpec("staged", {"dp": 2, "pp": 1, "cp": 1, "tp": 1})).results
    assert first == "models.staged_step: streams of another rank differ in length; pad them to one length"
    assert second == "models.staged_step: streams have [8, 12] tokens on this rank; pad them to one length"


def test_another_number_of_streams_is_rejected():
    def body(mesh, case):
        model = HybridLM(SMALL, Placement(mesh["cp"], mesh["tp"]))
        schedule, loss, stages = in_stages(mesh, model, streams_of(8, 8), "GPipe")
        with pytest.raises(
            ValueError, match=re.escape("args[0] has 3 rows, the schedule was built for local_batch_size=2")
        ):
            staged_step(schedule, stages, loss, streams_of(8, 8, 8), [mesh["cp"]])

    run(body, CaseSpec("staged", {"pp": 1, "cp": 1, "tp": 1}))
