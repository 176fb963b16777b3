"""Every misuse of a strategy: the same error on every rank, nothing sent, the model as it was."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parity_tests import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.parallelizer.families import Chosen, made
from torch_impl.parallelizer import fsdp2_strategy_parallelize, get_hf_tp_shard_plan
from torch_impl.parallelizer import translate_to_torch_parallel_style as style

TP, DP = {"dp_shard": 1, "tp": 2}, {"dp_shard": 2}


def edited_plan(model, **edit):
    plan = get_hf_tp_shard_plan(model)
    return {**plan, **{key.replace("__", "."): value for key, value in edit.items()}}


MISUSES = [
    (DP, dict(model=3), TypeError, "model: is a int; pass a torch.nn.Module"),
    (DP, dict(device_mesh=(2,)), TypeError, "device_mesh: is a tuple; pass a torch DeviceMesh"),
    ({"dp": 2}, dict(), ValueError, r"device_mesh: axis 'dp' of \('dp',\) is not known"),
    ({"tp": 1, "data_parallel": 2}, dict(), ValueError, "device_mesh: axes .* mix older names"),
    (DP, dict(mp_policy=torch.bfloat16), TypeError, "mp_policy: is a dtype; pass a MixedPrecisionPolicy or None"),
    (
        DP,
        dict(mp_policy=MixedPrecisionPolicy(param_dtype="bf16")),  # pyright: ignore[reportArgumentType]
        TypeError,
        "mp_policy: its param_dtype is 'bf16'; pass a dtype of floats or None",
    ),
    (
        DP,
        dict(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)),
        TypeError,
        "mp_policy: its reduce_dtype is torch.int8; pass a dtype of floats or None",
    ),
    (DP, dict(offload_policy=True), TypeError, "offload_policy: is a bool; pass a CPUOffloadPolicy or None"),
    (DP, dict(activation_checkpointing=1), TypeError, "activation_checkpointing: is 1, a int; pass True or False"),
    (DP, dict(reshard_after_forward=2), TypeError, "reshard_after_forward: is 2, a int; pass True or False"),
    (DP, dict(tp_shard_plan={"lm_head": "colwise"}), TypeError, "the value of 'lm_head' is 'colwise', not a Parallel"),
    (TP, dict(tp_shard_plan=[]), TypeError, "tp_shard_plan: is a list; pass a dict of module name -> ParallelStyle"),
    (TP, dict(tp_shard_plan=None), ValueError, "tp_shard_plan: has no entry for tp=2"),
    (TP, dict(tp_shard_plan={}), ValueError, "tp_shard_plan: has no entry for tp=2"),
    (
        TP,
        dict(tp_shard_plan=lambda model: edited_plan(model, model__layers__0__attn=ColwiseParallel())),
        ValueError,
        "tp_shard_plan: key 'model.layers.0.attn' matches no module of LlamaForCausalLM",
    ),
    (
        TP,
        dict(tp_shard_plan=lambda model: edited_plan(model, lm_head=RowwiseParallel())),
        ValueError,
        "but they share one parameter; give both the same placement",
    ),
    (
        {"dp_shard": 1, "tp": 4},
        dict(tp_shard_plan=get_hf_tp_shard_plan),
        ValueError,
        "num_key_value_heads=2 does not divide by tp=4",
    ),
    (
        {"dp_shard": 2, "tp": 2},
        dict(tp_shard_plan=lambda model: {"model.layers.0.mlp.gate_proj": style("packed_colwise")}),
        ValueError,
        "'model.layers.0.mlp.gate_proj.weight' is packed and FSDP would shard it over 2 ranks",
    ),
]


def snapshot(model):
    """What a strategy might change of a model."""
    if not isinstance(model, nn.Module):
        return None
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    parameters = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    return modules, hooks, parameters, model.config.use_cache


@pytest.mark.parametrize(("mesh", "edit", "kind", "said"), MISUSES, ids=[each[3][:50] for each in MISUSES])
def test_misuse(mesh, edit, kind, said):
    def body(view, case):
        model = made(Chosen("llama", tied=True), torch.float32)
        arguments = {"model": model, "device_mesh": view.device_mesh, "activation_checkpointing": True, **edit}
        if callable(edit.get("tp_shard_plan")):
            arguments["tp_shard_plan"] = edit["tp_shard_plan"](model)
        before = snapshot(model)
        try:
            fsdp2_strategy_parallelize(**arguments)
        except (TypeError, ValueError) as error:
            return type(error), str(error), snapshot(model) == before
        return None

    ranks = run(body, CaseSpec(scheme="misuse", mesh=mesh))
    assert len(set(ranks.results)) == 1
    got, words, is_unchanged = ranks.results[0]
    assert got is kind and re.search(said, words) and is_unchanged
    assert ranks.ledger.rows == []


@pytest.mark.parametrize("wrapped", ["", "model.layers.1", "model.layers.1.mlp"])
def test_a_model_that_is_parallel_already(wrapped):
    def body(view, case):
        model = made(Chosen("llama"), torch.float32)
        fsdp2_strategy_parallelize(model.get_submodule(wrapped), view.device_mesh)
        with pytest.raises(ValueError) as error:
            fsdp2_strategy_parallelize(model, view.device_mesh, MixedPrecisionPolicy())
        return str(error.value)

    name = repr(wrapped) if wrapped else "FSDPLlamaForCausalLM"
    said = f"model: {name} is already an FSDPModule; parallelize a model once"
    assert run(body, CaseSpec(scheme="twice", mesh=DP)).results == (said,) * 2


def test_a_replica_of_torch_is_parallel_already():
    def body(view, case):
        model = nn.Sequential(
            nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=view.device_mesh.get_group())
        )
        with pytest.raises(ValueError, match=r"model: '0' is a DistributedDataParallel; pass the module inside it"):
            fsdp2_strategy_parallelize(model, view.device_mesh)
        return True

    assert run(body, CaseSpec(scheme="ddp", mesh={"dp_shard": 1})).results == (True,)


def test_a_plan_for_one_rank_cuts_nothing():
    def body(view, case):
        model = made(Chosen("llama"), torch.float32)
        fsdp2_strategy_parallelize(model, view.device_mesh, tp_shard_plan=get_hf_tp_shard_plan(model))
        return {p.placements for p in model.parameters()} == {(torch.distributed.tensor.Shard(0),)}

    assert all(run(body, CaseSpec(scheme="no tp", mesh=DP)).results)
