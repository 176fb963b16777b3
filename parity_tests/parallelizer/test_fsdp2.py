"""Parity of fsdp2_strategy_parallelize: gradients, precision, cost; every misuse changes and sends nothing."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from jax_ref.parallelizer import from_state_dict
from jax_ref.parallelizer import mean_loss as reference_loss
from parity_tests.parallelizer.families import Chosen, batch, model_of
from parity_tests.parallelizer.steps import dims, mean_loss, parameter_counts, specs
from parity_tests.parallelizer.training import (
    TENSOR_PARALLEL,
    Training,
    accumulated,
    broken,
    full_arrays,
    on_mesh,
    parallelized,
)
from parity_tests.parity import parity
from parity_tests.rejections import check_rejection
from shardproof import CaseSpec, Cost, ids, scheme, token_below, values
from shardproof.declare.declared import flat
from shardproof.engines.engines import run
from torch_impl.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    translate_to_torch_parallel_style,
)

# Qwen3: norms of heads, a tied head. Llama: biases; two layers, of which the last stays whole. Phi3: fused projections.
ONE = (("num_hidden_layers", 1),)
QWEN3, LLAMA, PHI3 = Chosen("qwen3", True, ONE), Chosen("llama"), Chosen("phi3", True, ONE)


def declared(chosen, mesh, **changes):
    """The declaration that the schemes share: rows over all axes but tp, whole parameters, values of a real model."""
    tree, rows = specs(chosen, tuple(mesh)), "".join(f"/{axis}" for axis in mesh if axis not in TENSOR_PARALLEL)
    ordinary = {f"parameters.{path}": values("normal") for path in flat(tree)}
    return {
        "mesh": mesh,
        "inputs": {"parameters": tree, "token": f"b{rows} s", "target": f"b{rows} s"},
        "outputs": " ".join(f"{axis}=I" for axis in mesh),
        "draw": {**ordinary, "token": token_below("v"), "target": ids("v", ignore=-100)},
        "dims": {**dims(chosen), "b": (8,), "s": (5,)},
        "dtypes": ("float64", "float32"),
        "reduction": ("s", "d"),
        **changes,
    }


def step(mesh, chosen, parameters, token, target, policy, microbatches=1, **switches):
    return mean_loss(mesh, chosen, parameters, token, target, parallelized(policy, **switches), microbatches)


def own_dtype(parameters):
    """No policy for float64, which then stays float64; for float32 a policy that changes nothing."""
    first = next(iter(flat(parameters).values()))
    return None if first.dtype == torch.float64 else MixedPrecisionPolicy()


def loss_of(chosen):
    def loss(parameters, token, target):
        return reference_loss(from_state_dict(chosen.config, flat(parameters))(token), target)

    return loss


@scheme(
    reference=loss_of(QWEN3),
    rank_options={"microbatches": (1, 2), "recomputed": (False, True)},
    **declared(QWEN3, {"dp_replicate": (1, 2), "dp_shard": (1, 2), "tp": (1, 2)}),
)
def fully_sharded_step(mesh, parameters, token, target, microbatches, recomputed):
    switches = {"activation_checkpointing": recomputed}
    return step(mesh, QWEN3, parameters, token, target, own_dtype(parameters), microbatches, **switches)


@scheme(
    reference=loss_of(LLAMA),
    rank_options={"resharded": (None, False, True), "offloaded": (False, True)},
    **declared(LLAMA, {"data_parallel": (1, 2), "context_parallel": (1, 2), "tensor_parallel": (1, 2)}),
)
def fully_sharded_step_by_older_names(mesh, parameters, token, target, resharded, offloaded):
    offload = CPUOffloadPolicy() if offloaded else None  # asks for pinned memory, which a CPU lacks
    switches = {"reshard_after_forward": resharded, "offload_policy": offload}
    return step(mesh, LLAMA, parameters, token, target, own_dtype(parameters), **switches)


def cost(c):
    """Block and root are gathered forward, the root again backward; the gradients of both are reduced in float32.

    Two more sums are the loss's and its token count's; the step's own gathers, one for each gradient, return it whole.
    """
    n = c.dp_shard
    block, root, parameters = parameter_counts(PHI3, n)
    sums = {"all_reduce": (2, 8 + 4)}
    if n == 1:
        return Cost(forward=sums)
    gathered = {"all_gather": (1 + parameters, 2 * (root + block + root) // n)}
    return Cost(
        forward={**sums, "all_gather": (2, 2 * (block + root) // n)},
        backward={**gathered, "reduce_scatter": (2, 4 * (block + root))},
    )


@scheme(
    reference=loss_of(PHI3),
    rank_options={"has_policy": (False, True)},
    **declared(PHI3, {"dp_shard": (1, 2, 4)}, dtypes=("bfloat16",), roundings=16, cost=cost),
)
def fully_sharded_step_in_bfloat16(mesh, parameters, token, target, has_policy):
    """The default policy communicates as much as one that names its dtypes."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32) if has_policy else None
    return step(mesh, PHI3, parameters, token, target, policy)


SCHEMES = (fully_sharded_step, fully_sharded_step_by_older_names, fully_sharded_step_in_bfloat16)
test_parity = parity(SCHEMES, lockstep=8, gloo=2)


def test_signature_matches_the_page():
    parameters = inspect.signature(fsdp2_strategy_parallelize).parameters
    page = {"mp_policy": None, "tp_shard_plan": None, "offload_policy": None}
    assert list(parameters)[:5] == ["model", "device_mesh", *page]
    assert {name: parameters[name].default for name in page} == page
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[5:])


def ended(mesh, chosen, **switches):
    """Everything that two steps leave on rank 0."""
    ranks, _ = on_mesh(mesh, Training(chosen, accumulation=2, steps=2), parallelized(**switches))
    return [ranks[0].losses, *ranks[0].gradients.values(), *ranks[0].weights.values()]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    "switches",
    [{"activation_checkpointing": True}, {"offload_policy": CPUOffloadPolicy()}],
    ids=lambda s: next(iter(s)),
)
def test_saving_memory_changes_no_bit(mesh, switches):
    plain, saving = ended(mesh, LLAMA), ended(mesh, LLAMA, **switches)
    assert all(np.array_equal(a, b) for a, b in zip(plain, saving, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_bfloat16_matches_a_bfloat16_copy(family):
    """Each rank computes with a copy whose parameters are rounded and whose buffers are not; float32 means of both."""
    chosen = Chosen(family, tied=family != "llama")
    ids_, targets = batch(chosen, 4, 5)

    def body(mesh, case):
        model = parallelized()(model_of(chosen, torch.float32), mesh.device_mesh)
        accumulated(model, ids_, targets, mesh.rank("dp_shard"), 2, 1)
        return full_arrays(model, gradients=True)

    outcome = run(body, CaseSpec(scheme="bfloat16", mesh={"dp_shard": 2})).results[0]
    means = []
    for rank in range(2):
        copy = model_of(chosen, torch.float32)
        for parameter in copy.parameters():
            parameter.data = parameter.data.bfloat16()
        accumulated(copy, ids_, targets, rank, 2, 1)
        means.append({name: p.grad.float() for name, p in copy.named_parameters(remove_duplicate=False)})
    assert all(np.array_equal(((means[0][name] + means[1][name]) / 2).double(), outcome[name]) for name in outcome)


@pytest.mark.parametrize("expected", [None, torch.float32, torch.float64])
def test_output_dtype_applies_to_the_full_model(expected):
    """Only the root casts: a block that returned another dtype would hand it to a head in bfloat16."""

    def body(mesh, case):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, expected)
        model = parallelized(policy)(model_of(QWEN3, torch.float32), mesh.device_mesh)
        return str(model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.dtype)

    dtype = str(expected or torch.bfloat16)
    assert run(body, CaseSpec(scheme="output", mesh={"dp_shard": 2})).results == (dtype,) * 2


def test_a_plan_is_applied_before_fsdp():
    """Sharded over tp, then over dp, on the first dim for a column-wise style and on the second for a row-wise one."""

    def body(mesh, case):
        model = parallelized()(model_of(LLAMA), mesh.device_mesh)
        block = model.model.layers[0]
        return [tuple(p.to_local().shape) for p in (block.mlp.up_proj.weight, block.mlp.down_proj.weight)]

    assert run(body, CaseSpec(scheme="plan", mesh={"dp_shard": 2, "tp": 2})).results == ([(6, 12), (6, 12)],) * 4


@pytest.mark.parametrize("other", ["model.layers.2.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head"])
def test_blocks_that_share_a_parameter(other):
    """Two such blocks are one unit; a block that shares with the head is the root's. Gradients match the full model."""
    chosen = Chosen("llama", changes=(("num_hidden_layers", 3), ("vocab_size", 24), ("mlp_bias", False)))

    def tied():
        model = model_of(chosen)
        model.get_submodule(other).weight = model.model.layers[0].mlp.gate_proj.weight
        return model

    def body(mesh, case):
        model = parallelized()(tied(), mesh.device_mesh)
        accumulated(model, *batch(chosen, 4, 5), mesh.rank("dp_shard"), 2, 1)
        same = model.get_submodule(other).weight is model.model.layers[0].mlp.gate_proj.weight
        return full_arrays(model, gradients=True), same

    alone = tied()
    accumulated(alone, *batch(chosen, 4, 5), 0, 1, 1)
    for outcome, same in run(body, CaseSpec(scheme="shared", mesh={"dp_shard": 2}, dtype="float64")).results:
        assert broken(outcome, full_arrays(alone, gradients=True)) == [] and same


def test_buffers_and_names_stay_as_they_were():
    def body(mesh, case):
        model = model_of(QWEN3, torch.float32)
        names, buffers = list(model.state_dict()), {name: b.dtype for name, b in model.named_buffers()}
        same = parallelized(activation_checkpointing=True)(model, mesh.device_mesh)
        return (
            same is model and isinstance(model, FSDPModule),
            list(model.state_dict()) == names,
            {name: b.dtype for name, b in model.named_buffers()} == buffers,
            model.lm_head.weight is model.model.embed_tokens.weight,
            [type(layer).__name__ for layer in model.model.layers],
        )

    for mesh in ({"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"tp": 2}):
        results = run(body, CaseSpec(scheme="names", mesh=mesh)).results
        assert results == ((True, True, True, True, ["FSDPQwen3DecoderLayer"]),) * 2


@pytest.mark.fast_values(2)
@pytest.mark.parametrize("resharded", [None, True, False])
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_cost_matches_the_docstring(mesh, resharded):
    """Two blocks and the root, their parameters' first dims rounded up to multiples of two."""

    def body(view, case):
        model = model_of(LLAMA)
        local = [_padded(layer.parameters()) for layer in model.model.layers]
        local.append(_padded(model.parameters()) - sum(local))
        parallelized(reshard_after_forward=resharded)(model, view.device_mesh)
        rank = view.rank("dp_shard") + 2 * (view.rank("dp_replicate") if "dp_replicate" in view.axes else 0)
        accumulated(model, *batch(LLAMA, 4, 5), rank, case.world, 1)
        return local

    ranks = run(body, CaseSpec(scheme="cost", mesh=mesh, dtype="float64"))
    first, last, root = (8 * numbers for numbers in ranks.results[0])
    every, freed = (
        first + last + root,
        {None: (2, first + root), True: (3, first + last + root), False: (0, 0)}[resharded],
    )
    backward = {"reduce_scatter": (3, every)}
    if freed[0]:
        backward["all_gather"] = (freed[0], freed[1] // 2)
    if "dp_replicate" in mesh:
        backward["all_reduce"] = (3, every // 2)
    assert ranks.ledger.cost(0, "fwd") == {"all_gather": (3, every // 2)}
    assert ranks.ledger.cost(0, "bwd") == backward


def _padded(parameters):
    return sum(-(-len(p) // 2) * 2 * p[0].numel() for p in parameters)


@pytest.mark.slow
def test_the_output_may_be_changed_in_place():
    """The logits of a tensor-parallel model end in a view, on which FSDP's backward would be lost."""

    def body(mesh, case):
        ids_, _ = batch(QWEN3, 2, 5)
        outcome = []
        for in_place in (False, True):
            model = parallelized()(model_of(QWEN3), mesh.device_mesh)
            logits = model(input_ids=torch.from_numpy(ids_)).logits
            (logits.div_(2) if in_place else logits / 2).logsumexp(-1).sum().backward()
            outcome.append(full_arrays(model, gradients=True))
        return all(np.array_equal(outcome[0][name], outcome[1][name]) for name in outcome[0])

    assert all(run(body, CaseSpec(scheme="in place", mesh={"dp_shard": 2, "tp": 2})).results)


def test_an_edit_of_a_saved_tensor_is_autograds_error():
    """The model's output is a view of a tensor that autograd saves."""

    def body(mesh, case):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Flatten(0))
        plan = {"0": translate_to_torch_parallel_style("replicate")}
        output = fsdp2_strategy_parallelize(model, mesh.device_mesh, tp_shard_plan=plan)(torch.ones(2, 4)).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()

    run(body, CaseSpec(scheme="in place", mesh={"dp_shard": 1, "tp": 1}))


TP, DP = {"dp_shard": 1, "tp": 2}, {"dp_shard": 2}


def edited_plan(model, **edit):
    plan = get_hf_tp_shard_plan(model)
    return {**plan, **{key.replace("__", "."): value for key, value in edit.items()}}


MISUSES = [
    (DP, dict(model=3), TypeError, "parallelizer.fsdp2_strategy_parallelize: model is an int; pass a torch.nn.Module"),
    (DP, dict(device_mesh=(2,)), TypeError, "device_mesh is a tuple; pass a torch DeviceMesh"),
    ({"dp": 2}, dict(), ValueError, r"device_mesh: axis 'dp' of \('dp',\) is not known"),
    ({"tp": 1, "data_parallel": 2}, dict(), ValueError, "device_mesh: axes .* mix older names"),
    (DP, dict(mp_policy=torch.bfloat16), TypeError, "mp_policy is a dtype; pass a MixedPrecisionPolicy or None"),
    (
        DP,
        dict(mp_policy=MixedPrecisionPolicy(param_dtype="bf16")),  # pyright: ignore[reportArgumentType]
        TypeError,
        "mp_policy.param_dtype is 'bf16'; pass a floating dtype or None",
    ),
    (
        DP,
        dict(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.int8)),
        TypeError,
        "mp_policy.reduce_dtype is torch.int8; pass a floating dtype or None",
    ),
    (DP, dict(offload_policy=True), TypeError, "offload_policy is a bool; pass a CPUOffloadPolicy or None"),
    (DP, dict(activation_checkpointing=1), TypeError, "activation_checkpointing=1 is an int; pass True or False"),
    (DP, dict(reshard_after_forward=2), TypeError, "reshard_after_forward=2 is an int; pass True or False"),
    (
        DP,
        dict(tp_shard_plan={"lm_head": "colwise"}),
        TypeError,
        r"tp_shard_plan\['lm_head'\] is 'colwise', not a Parallel",
    ),
    (TP, dict(tp_shard_plan=[]), TypeError, "tp_shard_plan is a list; pass a dict of module name -> ParallelStyle"),
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
        {"dp_shard": 1, "tp": 3},
        dict(tp_shard_plan=get_hf_tp_shard_plan),
        ValueError,
        "num_attention_heads=4 does not divide by tp=3",
    ),
    (
        {"dp_shard": 2, "tp": 2},
        dict(
            tp_shard_plan=lambda model: {
                "model.layers.0.mlp.gate_proj": translate_to_torch_parallel_style("packed_colwise")
            }
        ),
        ValueError,
        "'model.layers.0.mlp.gate_proj.weight' is packed and FSDP would shard it over 2 ranks",
    ),
]


def snapshot(model):
    """The parts of a model that a strategy might change."""
    if not isinstance(model, nn.Module):
        return None
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    parameters = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    return modules, hooks, parameters, model.config.use_cache


@pytest.mark.parametrize(("mesh", "edit", "kind", "message"), MISUSES, ids=[each[3][:50] for each in MISUSES])
def test_misuse(mesh, edit, kind, message):
    def body(view, case):
        model = model_of(Chosen("llama", tied=True), torch.float32)
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
    assert got is kind and re.search(message, words) and is_unchanged
    assert ranks.ledger.rows == []


@pytest.mark.parametrize("wrapped", ["", "model.layers.1", "model.layers.1.mlp"])
def test_a_model_that_is_parallel_already(wrapped):
    def call(view):
        model = model_of(Chosen("llama"), torch.float32)
        fsdp2_strategy_parallelize(model.get_submodule(wrapped), view.device_mesh)
        fsdp2_strategy_parallelize(model, view.device_mesh, MixedPrecisionPolicy())

    name = repr(wrapped) if wrapped else "FSDPLlamaForCausalLM"
    check_rejection(DP, "twice", call, f"model: {name} is already an FSDPModule; parallelize a model once")


def test_a_scalar_parameter_is_rejected_before_anything_is_changed():
    def body(view, case):
        model = nn.Sequential(nn.Linear(2, 2))
        model.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match=r"model: parameter 'scale' is a scalar, which FSDP cannot shard"):
            fsdp2_strategy_parallelize(model, view.device_mesh)
        return not any(hasattr(parameter, "placements") for parameter in model.parameters())

    assert run(body, CaseSpec(scheme="scalar", mesh=DP)).results == (True,) * 2


def test_a_replica_of_torch_is_parallel_already():
    def body(view, case):
        model = nn.Sequential(
            nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=view.device_mesh.get_group())
        )
        with pytest.raises(ValueError, match=r"model: '0' is a DistributedDataParallel; pass the module inside it"):
            fsdp2_strategy_parallelize(model, view.device_mesh)
        return True

    assert run(body, CaseSpec(scheme="ddp", mesh={"dp_shard": 1})).results == (True,)


def test_a_plan_for_one_rank_shards_nothing():
    def body(view, case):
        model = model_of(Chosen("llama"), torch.float32)
        fsdp2_strategy_parallelize(model, view.device_mesh, tp_shard_plan=get_hf_tp_shard_plan(model))
        return {p.placements for p in model.parameters()} == {(torch.distributed.tensor.Shard(0),)}

    assert all(run(body, CaseSpec(scheme="no tp", mesh=DP)).results)
