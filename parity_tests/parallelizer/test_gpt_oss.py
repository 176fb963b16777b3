"""gpt-oss over ep, tp and cp: its experts have biases, its gates and ups alternate, its attention has sinks."""

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AttentionInterface

from jax_ref import expert_parallel as reference
from parity_tests.parallelizer.configurations import judged
from parity_tests.parallelizer.context_steps import LENGTH, alone, over_cp
from parity_tests.parallelizer.families import Chosen, model_of
from parity_tests.parallelizer.gpt_oss_net import STACKS, GptOssNet, experts_of, plan
from parity_tests.parallelizer.steps import reduced_loss
from parity_tests.parallelizer.training import broken, broken_on_ranks, parallelized
from parity_tests.rejections import check_rejection
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.collectives import convert
from torch_impl.context_parallel import context_parallel_attention
from torch_impl.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    translate_to_torch_parallel_style,
)
from torch_impl.parallelizer.dry_run import dry_run
from torch_impl.parallelizer.expert_validation import validate_experts
from torch_impl.parallelizer.mesh_axes import mesh_axes
from torch_impl.parallelizer.module_names import generic

AXES = "dp_shard=I ep=I tp=I"  # a parameter is whole on each rank, and so is its gradient
PARAMETERS = {
    "router": f"e d {AXES}",
    "router_bias": f"e {AXES}",
    "gate_up": f"e d f two {AXES}",
    "gate_up_bias": f"e f two {AXES}",
    "down": f"e f d {AXES}",
    "down_bias": f"e d {AXES}",
    "head": f"o d {AXES}",
}
NAMES = ("router.weight", "router.bias", *(f"experts.{name}" for name in STACKS))


def mean_square(x, parameters, k, limit):
    """The mean over the outputs for all tokens of both batches."""
    router, router_bias, gate_up, gate_up_bias, down, down_bias, head = (parameters[name] for name in PARAMETERS)
    tokens = x.reshape(-1, x.shape[-1])
    gates, experts, _ = reference.top_k_softmax(tokens @ router.T + router_bias[None], k)
    routed = reference.mixture_with_biases(tokens, gates, experts, gate_up, down, gate_up_bias, down_bias, limit)
    return jnp.mean(((tokens + routed) @ head.T) ** 2)


@scheme(
    reference=mean_square,
    mesh={"dp_shard": (1, 2), "ep": (1, 2), "tp": (1, 2)},
    inputs={"x": "m t/dp_shard/ep d", "parameters": PARAMETERS},
    outputs=AXES,
    dims={"m": (2,), "two": (2,), "e": (4, 8), "d": (4, 7), "f": (4, 2), "o": (3,)},
    draw=dict.fromkeys(("x", *(f"parameters.{name}" for name in PARAMETERS)), values("normal")),
    options={"k": (2, 1, 3), "limit": (0.7137, 7.0)},
    rank_options={"recomputed": (False, True), "resharded": (None, False)},
    nograd=("x",),
    dtypes=("float32", "float64"),
    roundings=6,
    reduction=("t", "d", "e", "f"),
)
@pytest.mark.cases(1, engine="gloo")
@pytest.mark.cases(6)
def step_of_gpt_oss_experts(mesh, x, parameters, k, limit, recomputed, resharded):
    axes = mesh_axes(mesh.device_mesh)
    p = {name: parameters[name] for name in PARAMETERS}
    p |= {name: parameters[name].flatten(-2) for name in ("gate_up", "gate_up_bias")}
    named = {f"blocks.0.{name}": p[leaf] for name, leaf in zip(NAMES, PARAMETERS, strict=False)}
    named["head.weight"] = p["head"]

    def local_loss(*tensors):
        net = GptOssNet({name: x.contiguous() for name, x in zip(named, tensors, strict=True)}, k, limit)
        model = fsdp2_strategy_parallelize(
            net, mesh.device_mesh, MixedPrecisionPolicy(param_dtype=x.dtype), plan(),
            activation_checkpointing=recomputed, reshard_after_forward=resharded,
        )  # fmt: skip
        outputs = len(x) * mesh.total("t") * p["head"].shape[0]
        return model, [model(batch).square().sum() / outputs for batch in x]

    return reduced_loss(axes, named, local_loss)


GPT_OSS = Chosen("gpt_oss")
SEQUENCES = {"sequence_parallel": True}
SETTINGS = [
    ({"ep": 2}, {}),
    ({"dp_shard": 1, "ep": 2, "tp": 2}, {}),
    ({"dp_shard": 2, "ep": 2}, {"activation_checkpointing": True}),
    ({"dp_shard": 1, "ep": 2, "tp": 2}, SEQUENCES),
    ({"dp_shard": 1, "tp": 2}, SEQUENCES | {"enable_async_tensor_parallel": True}),
    ({"tp": 4}, {}),  # more ranks than heads of keys and values
]


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(("mesh", "switches"), SETTINGS, ids=str)
def test_one_step_matches_one_process(mesh, switches):
    assert judged(GPT_OSS, mesh, LENGTH, **switches) == []


def test_sinks_are_sharded_with_their_heads():
    """Our own plan shards them: the plan in transformers has only the head."""

    def body(view, case):
        model = parallelized()(model_of(GPT_OSS), view.device_mesh)
        attention = model.model.layers[0].self_attn
        return tuple(attention.sinks.to_local().shape), tuple(attention.q_proj.weight.to_local().shape)

    assert run(body, CaseSpec("sinks", {"tp": 2}, dtype="float64")).results == (((2,), (8, 12)),) * 2
    assert "model.layers.*.self_attn" in get_hf_tp_shard_plan(model_of(GPT_OSS))


def test_the_dry_run_has_the_shards_and_the_exchanges():
    mesh = {"dp_shard": 2, "ep": 2, "tp": 2}

    def body(view, case):
        model = parallelized()(model_of(GPT_OSS), view.device_mesh)
        shapes = {generic(name): tuple(p.to_local().shape) for name, p in model.named_parameters()}
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.int64))
        return shapes

    ranks = run(body, CaseSpec("dry", mesh, dtype="float64"))
    report = dry_run(model_of(GPT_OSS), mesh, tokens=LENGTH)
    assert {each.name: each.local_shape for each in report.parameters} == ranks.results[0]
    assert report.unknown == () and report.unmatched == ()
    calls = {each.op: each.calls for each in report.collectives if each.phase == "forward" and each.axis == "ep"}
    layers = GPT_OSS.config.num_hidden_layers
    assert calls == {"all_to_all": 5 * layers} == {"all_to_all": sum(r.op == "all_to_all" for r in ranks.ledger.of(0))}


# ---- Over cp


def attention_over_cp(
    module, query, key, value, attention_mask, *, scaling, sliding_window, s_aux, cp_group, layout, **others
):  # fmt: skip
    # FSDP sums the ranks' gradients; without this, attention would give each rank the sum over cp already.
    sinks = convert(s_aux, cp_group, src="R", dst="I")
    options = {"window": sliding_window, "scale": scaling, "sinks": sinks}
    return context_parallel_attention(query, key, value, group=cp_group, layout=layout, **options).transpose(1, 2), None


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 1, "cp": 2},
        {"dp_shard": 1, "cp": 2, "tp": 2},
        {"dp_shard": 1, "cp": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2},
    ],
    ids=str,
)
def test_over_cp(mesh):
    """The model calls an attention that is registered; transformers makes no mask for one that it does not know."""
    AttentionInterface.register("over_cp", attention_over_cp)

    def body(view, case):
        return over_cp(view, GPT_OSS, lambda model: model.set_attn_implementation("over_cp"))

    ranks, want = run(body, CaseSpec("cp", mesh, dtype="float64")).results, alone(GPT_OSS)
    assert broken_on_ranks(ranks, want, mesh) == []
    sinks = "model.layers.0.self_attn.sinks"
    assert broken(ranks[0], {**want, sinks: 2 * want[sinks]})  # a factor would show


# ---- Rejections


def experts(**changes):
    """Two experts of gpt-oss, each with 3 pairs of columns."""
    shapes = {"gate_up_proj": (2, 4, 6), "gate_up_proj_bias": (2, 6), "down_proj": (2, 3, 4), "down_proj_bias": (2, 4)}
    module = experts_of({name: torch.zeros(shape) for name, shape in shapes.items()}, limit=6.0)
    for name, value in {"alpha": 1.5, **changes}.items():
        setattr(module, name, value)
    return module


def halves(columns):
    gate, up = columns.chunk(2, -1)
    return (up.clamp(-6, 6) + 1) * gate.clamp(max=6) * torch.sigmoid(1.5 * gate.clamp(max=6))


REJECTED = {
    "has stacks [2, 4, 6] and [2, 2, 4], not [e, d, 2f] and [e, f, d]; use tp alone": experts(
        down_proj=nn.Parameter(torch.zeros(2, 2, 4))
    ),
    "has stacks [2, 4, 6] and [2, 3, 4], not [e, d, 2f] and [e, f, d]; use tp alone": experts(
        down_proj_bias=nn.Parameter(torch.zeros(2, 3))
    ),
    "has 'extra' beside its stacks, which is not sharded over ep; use tp alone": experts(
        extra=nn.Parameter(torch.zeros(1))
    ),
    "has 3 pairs of columns of gate and up, which tp=2 does not divide; use a tp that does": experts(),
}
WITHOUT_TP = {
    "has another unit than gpt-oss's, whose gates and ups alternate; use tp alone": experts(_apply_gate=halves),
    "is not called with hidden_states, router_indices, routing_weights; use tp alone": experts(forward=lambda x: x),
}


@pytest.mark.parametrize("message", [*REJECTED, *WITHOUT_TP])
def test_experts_that_are_rejected(message):
    mesh = {"ep": 2, "tp": 2} if message in REJECTED else {"ep": 2, "tp": 1}

    def call(view):
        model = nn.ModuleDict({"experts": (REJECTED | WITHOUT_TP)[message], "up": nn.Linear(2, 2)})
        plan = {"up": translate_to_torch_parallel_style("colwise")} if view.size("tp") > 1 else None
        fsdp2_strategy_parallelize(model, view.device_mesh, tp_shard_plan=plan)

    check_rejection(mesh, "experts", call, f"device_mesh: ep=2, and 'experts' {message}")


def test_experts_of_these_sizes_are_taken():
    assert list(validate_experts(nn.ModuleDict({"experts": experts()}), 2, 3)) == ["experts"]
