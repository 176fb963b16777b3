"""The dry run and a run have the same shapes and bytes on each rank, and the same collectives."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parity_tests.parallelizer.expert_families import OF_FAMILY
from parity_tests.parallelizer.families import OWN, Chosen, batch, empty, model_of
from parity_tests.parallelizer.training import accumulated, parallelized
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer import add_lora
from torch_impl.parallelizer.dry_run import dry_run
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize
from torch_impl.parallelizer.hf_plan import translate_to_torch_parallel_style

MESHES = [
    {"dp_shard": 2},
    {"tp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 1},
    {"data_parallel": 1, "context_parallel": 2, "tensor_parallel": 2},
]


RUNS = [("llama", mesh) for mesh in MESHES] + [
    (family, {"dp_shard": 2, "tp": 2}) for family in (*OWN, "gpt2") if family != "llama"
]
RUNS.append(("qwen2", {"tp": 4}))  # more ranks than heads of keys and values


# Every token has all experts, so that their loads are equal.
OF_EXPERTS = [
    (Chosen(family, changes=(*OF_FAMILY[family].items(), ("num_experts_per_tok", 4))), dtype, mesh)
    for family, dtype, mesh in (
        ("qwen3_moe", torch.float64, {"ep": 2}),
        ("mixtral", torch.float32, {"ep": 2, "tp": 2}),
        ("qwen3_moe", torch.float32, {"dp_shard": 2, "ep": 2}),
        ("mixtral", torch.float64, {"dp_replicate": 2, "ep": 2}),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), RUNS, ids=str)
def test_the_plan_matches_a_run(family, mesh):
    dtype = torch.float32 if family == "llama" else torch.float64  # a float32 model computes in bfloat16
    compare(Chosen(family, tied=family in ("qwen3", "gemma")), dtype, mesh)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(("chosen", "dtype", "mesh"), OF_EXPERTS, ids=str)
def test_the_plan_matches_a_run_with_experts_over_ep(chosen, dtype, mesh):
    compare(chosen, dtype, mesh)


def test_experts_over_ep_and_tp_communicate_over_these_axes():
    chosen = next(chosen for chosen, _, mesh in OF_EXPERTS if mesh == {"ep": 2, "tp": 2})
    report = dry_run(empty(chosen, torch.float32, "meta"), {"ep": 2, "tp": 2}, tokens=10)
    assert {each.axis for each in report.collectives} == {"ep", "tp"}


def compare(chosen, dtype, mesh):
    data = 1
    for axis, size in mesh.items():
        data *= 1 if axis in ("tp", "tensor_parallel") else size

    def body(view, case):
        model = parallelized()(model_of(chosen, dtype), view.device_mesh)
        torch.distributed.barrier()
        accumulated(model, *batch(chosen, 2 * data, 5), view.device_mesh.get_rank() % data, data, 1)
        return {name: (tuple(p.to_local().shape), p.to_local().nbytes) for name, p in model.named_parameters()}

    ranks = run(body, CaseSpec(scheme="dry", mesh=mesh, dtype="float64"))
    report = dry_run(empty(chosen, dtype, "meta"), mesh, tokens=10)
    assert promised(report) == measured(ranks.ledger)
    shards = ranks.results[0]
    assert {each.local_shape for each in report.parameters} == {shape for shape, _ in shards.values()}
    assert report.local_bytes == sum(size for _, size in shards.values())
    assert (report.unmatched, report.unknown) == ((), ())


def measured(ledger):
    """Calls and bytes of the first rank after the barrier, by phase and operation."""
    rows = [row for row in ledger.rows if row.rank == 0]
    calls, sizes = Counter(), Counter()
    for row in rows[1 + max(i for i, row in enumerate(rows) if row.op == "barrier") :]:
        calls[row.phase, row.op] += 1
        sizes[row.phase, row.op] += row.bytes_in
    return calls, sizes


def promised(report):
    """Calls and bytes that a dry run expects, by phase and operation."""
    calls, sizes = Counter(), Counter()
    for each in report.collectives:
        key = {"forward": "fwd", "backward": "bwd"}[each.phase], each.op
        calls[key] += each.calls
        sizes[key] += each.bytes_in
    return calls, sizes


def three_layers():
    """An embedding of width 12, a layer to 8 features and one back, in float64; the first layer's bias is frozen."""
    model = nn.Sequential(nn.Embedding(16, 12), nn.Linear(12, 8), nn.Linear(8, 12), nn.Identity()).double()
    model[1].bias.requires_grad_(False)
    return model


named = translate_to_torch_parallel_style
COUNTED = [
    {"1": "colwise", "2": "rowwise"},
    {"1": "packed_colwise", "2": "packed_rowwise"},
    {"0": "embedding_rowwise", "1": "colwise_gather_output", "2": "rowwise_split_input"},
    {"0": "embedding_colwise", "1": "replicated_with_grad_allreduce"},
    {"1": "replicate", "3": "moe_identity_expert"},
]
COUNTED = [{key: named(style) for key, style in plan.items()} for plan in COUNTED]
NOT_COUNTED = [
    ({"1": ColwiseParallel(input_layouts=Shard(-1)), "2": RowwiseParallel()}, "1"),
    ({"1": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(-1))}, "2"),
    ({"0": ColwiseParallel(), "3": named("all_reduce")}, "3"),
]


def check_against_a_run(model_of_run, plan):
    """A dry run reports the shapes and the bytes of a run."""

    def body(view, case):
        model = fsdp2_strategy_parallelize(model_of_run(), view.device_mesh, None, plan)
        torch.distributed.barrier()
        model(torch.arange(10).view(2, 5)).sum().backward()
        return {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}

    ranks = run(body, CaseSpec(scheme="dry", mesh={"tp": 2}, dtype="float64"))
    report = dry_run(model_of_run().to("meta"), {"tp": 2}, plan, tokens=10)
    assert promised(report) == measured(ranks.ledger)
    assert {each.name: each.local_shape for each in report.parameters} == ranks.results[0]
    assert report.unknown == ()


@pytest.mark.parametrize("plan", COUNTED, ids=str)
def test_bytes_of_each_style_match_the_measured_ones(plan):
    check_against_a_run(three_layers, plan)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("styles", [("colwise", "rowwise"), ("colwise_gather_output", "rowwise_split_input")])
def test_bytes_of_adapters_match_the_measured_ones(styles, dora):
    def adapted():
        model = add_lora(three_layers(), ["1", "2"], rank=3, alpha=1.0, dora=dora)
        return model.requires_grad_(True)  # so every layer's input has a gradient, as behind a first adapter

    check_against_a_run(adapted, {key: named(style) for key, style in zip("12", styles, strict=True)})


@pytest.mark.parametrize(("plan", "name"), NOT_COUNTED, ids=str)
def test_uncounted_parts_are_reported(plan, name):
    report = dry_run(three_layers().to("meta"), {"tp": 2}, plan, tokens=10)
    assert report.unknown == (name,)
    assert f"collectives of {name!r} are not counted" in str(report)


def test_packed_halves_are_shown():
    plan = {"1": named("packed_colwise"), "2": named("packed_rowwise")}
    rows = dry_run(three_layers().to("meta"), {"tp": 2}, plan).parameters
    assert [each.placements.rpartition(", ")[2] for each in rows] == [
        "tp Replicate()",
        *["tp Shard(0) of each half"] * 2,
        *["tp Shard(1) of each half", "tp Replicate()"],
    ]


@pytest.mark.parametrize(
    ("replicas", "placements"), [(1, "dp_shard Shard(0)"), (2, "dp_replicate Replicate(), dp_shard Shard(0)")]
)
def test_axes_that_shard_or_replicate_are_shown(replicas, placements):
    rows = dry_run(three_layers().to("meta"), {"dp_replicate": replicas, "dp_shard": 2}).parameters
    assert {each.placements for each in rows} == {placements}


class Mixed(nn.Module):
    """Two blocks with different dtypes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float32)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def test_one_parameter_of_float64_keeps_all_dtypes():
    def body(view, case):
        model = fsdp2_strategy_parallelize(Mixed(), view.device_mesh)
        torch.distributed.barrier()
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()

    ranks = run(body, CaseSpec(scheme="dry", mesh={"dp_shard": 2}, dtype="float64"))
    assert promised(dry_run(Mixed().to("meta"), {"dp_shard": 2})) == measured(ranks.ledger)


@pytest.mark.slow
def test_a_large_model_on_a_mesh_that_is_not_there():
    more = (("num_hidden_layers", 80), ("hidden_size", 8192), ("intermediate_size", 28672), ("vocab_size", 128256),
            ("num_attention_heads", 64), ("num_key_value_heads", 8), ("head_dim", 128))  # fmt: skip
    report = dry_run(empty(Chosen("llama", changes=more), torch.bfloat16, "meta"), {"dp_shard": 64, "tp": 8})
    shards = {each.name: each.local_shape for each in report.parameters}
    assert shards["model.layers.*.mlp.down_proj.weight"] == (8192 // 64, 28672 // 8)
    assert str(report).splitlines()[0].startswith("dp_shard=64 tp=8: 512 ranks; ")
    assert report.total_bytes // 512 <= report.local_bytes < report.total_bytes // 400


def test_keys_that_match_nothing_are_reported():
    model = empty(Chosen("qwen3"), device="meta")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.experts": "replicate"}
    report = dry_run(model, {"tp": 2})
    assert report.unmatched == ("model.layers.*.mlp.experts",)
    assert "plan key 'model.layers.*.mlp.experts' matches nothing in this model" in str(report)


@pytest.mark.parametrize(
    ("mesh", "tokens", "message"),
    [
        ({"dp": 2}, 1, "device_mesh: axis 'dp' of"),
        ({"dp_shard": 0}, 1, r"parallelizer.dry_run: mesh\['dp_shard'\]=0 is not a size; it is 1 or more"),
        ({"dp_shard": 1}, 0, "parallelizer.dry_run: tokens=0 must be at least 1"),
        ({"tp": 3}, 1, "num_attention_heads=4 does not divide by tp=3"),
    ],
)
def test_models_that_would_be_rejected(mesh, tokens, message):
    with pytest.raises(ValueError, match=message):
        dry_run(empty(Chosen("llama"), device="meta"), mesh, tokens=tokens)


def test_a_scalar_parameter_is_rejected_as_it_is_when_parallelized():
    model = nn.Sequential(nn.Linear(4, 4))
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"parameter 'scale' is a scalar, which FSDP cannot shard; make it \[1\]"):
        dry_run(model, {"dp_shard": 2})
