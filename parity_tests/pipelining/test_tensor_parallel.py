"""Parity of stages whose modules are sharded over tp, alone and under FSDP2, with micro-batch accumulation."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from parity_tests.pipelining.unsplit_models import LENGTH, PROMISED, ROWS, accumulated, chosen, loss_of, tokens
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer import get_hf_tp_shard_plan
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize
from torch_impl.parallelizer.tp_plan import apply_plan
from torch_impl.pipelining.functional import pipeline_model

families = pytest.importorskip("parity_tests.parallelizer.families", reason="needs transformers")

LAYERS, N = 4, 4


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def stepped(mesh, case):
    """Two steps on one rank: losses of the last, full gradients by name, and names of the sharded parameters."""
    of, is_whole_plan, axes = chosen(case.family, case.tied, LAYERS), case.whole_plan, set(mesh.axes)
    model = families.model_of(of, torch.float64)
    plan_of_all = get_hf_tp_shard_plan(model)

    def parallelize(part, world_mesh, moe_mesh, *, dp_axis_names, tp_axis_name, **options):
        plan = plan_of_all if is_whole_plan else get_hf_tp_shard_plan(part)
        if dp_axis_names:
            fsdp2_strategy_parallelize(part, world_mesh, tp_shard_plan=plan, reshard_after_forward=False)
        else:
            apply_plan(part, plan, world_mesh[tp_axis_name])

    schedule, parts, has_first, has_last, _ = pipeline_model(
        model,
        mesh.device_mesh,
        None,
        pp_axis_name="pp",
        dp_axis_names=("dp_shard",) if "dp_shard" in axes else (),
        tp_axis_name="tp",
        layers_per_stage=None,
        pipeline_parallel_schedule_csv=None,
        pipeline_parallel_schedule=case.name,
        microbatch_size=ROWS,
        local_batch_size=N * ROWS,
        device=torch.device("cpu"),
        loss_fn=loss_of,
        parallelize_fn=parallelize,
        seq_len=LENGTH,
    )
    ids, targets = tokens(of, N)
    for _ in range(2):
        losses = []
        schedule.step(*([ids] if has_first else []), **({"target": targets, "losses": losses} if has_last else {}))
    named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    cut = {name for name, parameter in named.items() if full(parameter).shape != local(parameter).shape}
    return [loss.item() for loss in losses], {name: full(p.grad).numpy() for name, p in named.items()}, cut


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def check_steps(axes, **options):
    ranks = run(stepped, CaseSpec("tensor_parallel", axes, options=options))
    losses, gradients = accumulated(chosen(options["family"], options["tied"], LAYERS), N, "float64", range(N), 2)
    of_ranks = {}
    assert sum(bool(of_last) for of_last, *_ in ranks.results) == len(ranks.results) // axes["pp"]
    for of_last, of_rank, cut in ranks.results:
        of_ranks |= of_rank
        assert any(name.endswith("q_proj.weight") for name in cut)
        for ours, theirs in zip(of_last, losses if of_last else [], strict=True):
            assert abs(ours - theirs) <= PROMISED * abs(theirs)
        for name, ours in of_rank.items():
            theirs = torch.frombuffer(bytearray(gradients[name]), dtype=torch.float64).view(ours.shape)
            assert (torch.from_numpy(ours) - theirs).norm() <= PROMISED * theirs.norm(), name
    assert set(of_ranks) == set(gradients)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("name", "tied"), [("1F1B", True), ("GPipe", False), ("InterleavedZeroBubble", True), ("ZBVZeroBubble", True)]
)
def test_with_tp_inside_stages(family, name, tied):
    check_steps({"pp": 2, "tp": 2}, family=family, tied=tied, name=name, whole_plan=False)


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_the_plan_of_the_full_model_applies_to_its_parts(name):
    check_steps({"pp": 2, "tp": 2}, family="llama", tied=False, name=name, whole_plan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_with_tp_and_fsdp_inside_stages(name):
    """Both dp ranks have the same batch, so that the mean over them is the gradient."""
    check_steps({"pp": 2, "dp_shard": 2, "tp": 2}, family="qwen3", tied=True, name=name, whole_plan=False)
