"""Megatron-FSDP's contract, natively: every strategy and switch gives the gradients and weights of one device."""

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parity_tests.parallelizer.families import Chosen
from parity_tests.parallelizer.meta_values import AXES, SEEDS, names_of_other_values
from parity_tests.parallelizer.reference import reference
from parity_tests.parallelizer.small_net import BLOCK, NAMES, PLAN, Block, Net, full_tensors, net_of, plan
from parity_tests.parallelizer.training import Training, on_mesh, verdict
from shardproof import CaseSpec, scheme, values
from shardproof.engines.engines import run
from torch_impl.parallelizer import get_hf_tp_shard_plan, megatron_fsdp_strategy_parallelize
from torch_impl.parallelizer.adapters.megatron import ALIASES, CUDA_ONLY, STRATEGIES
from torch_impl.parallelizer.adapters.nvfsdp import nvfsdp_strategy_parallelize

MESH = dict.fromkeys(AXES, (1, 2))
EVERYWHERE = "dp_replicate=I dp_shard=I tp=I"
WEIGHTS = {
    "up_0": f"f d {EVERYWHERE}",
    "down_0": f"d f {EVERYWHERE}",
    "up_1": f"f d {EVERYWHERE}",
    "down_1": f"d f {EVERYWHERE}",
    "head": f"o d {EVERYWHERE}",
}
ORDINARY = values("normal", "ties")
RATES = {"blocks": 0.5, "head": 0.25}  # of two groups of parameters
STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
BLOCKS = 2
SWITCHES = ("plain", "average_in_collective", "disable_bucketing", "calculate_per_token_loss", "grad_reduce_in_fp32")
SWITCHES += ("preserve_fp32_weights",)  # which leaves wide parameters as they are


def reference_step(x, up_0, down_0, up_1, down_1, head, cotangent, recomputes):
    """The output, the gradients of the mean over rows, the weights after one step, and three counts.

    The counts: weights sharded over tp, calls of blocks, and initial values that differ from one process's values.
    """

    def forward(up_0, down_0, up_1, down_1, head):
        hidden = x + jax.nn.silu(x @ up_0.T) @ down_0.T
        hidden = hidden + jax.nn.silu(hidden @ up_1.T) @ down_1.T
        return hidden @ head.T

    weights = (up_0, down_0, up_1, down_1, head)
    y, pullback = jax.vjp(forward, *weights)
    gradients = pullback(cotangent / len(x))
    rates = [RATES["blocks"]] * 4 + [RATES["head"]]
    counts = jnp.asarray([len(PLAN) * BLOCKS, BLOCKS * (2 if recomputes else 1), 0], y.dtype)
    return y, *gradients, *(w - rate * g for w, g, rate in zip(weights, gradients, rates, strict=True)), counts


def descent(net):
    groups = [{"params": list(getattr(net, name).parameters()), "lr": rate} for name, rate in RATES.items()]
    return torch.optim.SGD(groups, foreach=False)


@scheme(
    reference=reference_step,
    mesh=MESH,
    inputs={
        "x": "b/dp_replicate/dp_shard d tp=I",
        **WEIGHTS,
        "cotangent": "b/dp_replicate/dp_shard o tp=I",
    },
    outputs=("b/dp_replicate/dp_shard o tp=I", *WEIGHTS.values(), *WEIGHTS.values(), f"m {EVERYWHERE}"),
    dims={"b": (4,), "d": (3,), "f": (4, 5), "o": (2, 1), "m": (3,)},  # with one row of the head a rank has none
    options={"recomputes": (False, True)},
    rank_options={
        "strategy": STRATEGIES,
        "has_units": (True, False),
        "switch": SWITCHES,
        "entry": ("older", "newer", "by stage", "older, on meta"),
        "seed": tuple(SEEDS),
    },
    nograd=("x", *WEIGHTS, "cotangent"),
    draw=dict.fromkeys(("x", *WEIGHTS, "cotangent"), ORDINARY),
    dtypes=("float64", "float32"),
    roundings=6,
    excluded_conditions=("strided", "autocast"),  # FSDP takes contiguous parameters alone
)
@pytest.mark.cases(30)
def strategies(
    mesh, x, up_0, down_0, up_1, down_1, head, cotangent, strategy, has_units, switch, recomputes, entry, seed
):  # fmt: skip
    """Reduce the gradients after the last one-row microbatch, then take one step of SGD with a rate for each group."""
    net = net_of(dict(zip(NAMES, (up_0, down_0, up_1, down_1, head), strict=True)))
    for block in net.blocks:
        block.up.register_forward_pre_hook(lambda *_: calls.append(1))
    switches = {"activation_checkpointing": recomputes, **({} if switch == "plain" else {switch: True})}
    units = [BLOCK] if has_units else None
    others = []
    if entry == "older, on meta":
        of_units = "modules" if switch == "disable_bucketing" else "blocks" if has_units else "model"
        others = names_of_other_values(mesh.device_mesh[AXES], strategy, of_units, seed)
    if entry.startswith("older"):
        net = nvfsdp_strategy_parallelize(net, mesh.device_mesh, units, plan(), strategy, **switches)
        optimizer = descent(net)
    else:  # make the sharded optimizer from the unsharded model's
        zero = STAGES[strategy] if entry == "by stage" else strategy
        net, optimizer = megatron_fsdp_strategy_parallelize(
            net, mesh.device_mesh, descent(net), units, plan(), zero, **switches
        )
    data = mesh.size("dp_replicate") * mesh.size("dp_shard")
    scale = 1 / (data * len(x)) if switch == "calculate_per_token_loss" else 1 / len(x)
    outputs, calls = [], []
    for micro, (rows, part) in enumerate(zip(x.split(1), cotangent.split(1), strict=True)):
        net.set_requires_gradient_sync(micro == len(x) - 1)
        outputs.append(net(rows))
        outputs[-1].backward(part * scale)
    gradients = full_tensors(net, gradients=True)
    optimizer.step()
    counts = x.new_tensor([sum(map(is_over_tp, net.parameters())), len(calls) // len(x), len(others)])
    return torch.cat(outputs).detach(), *gradients.values(), *full_tensors(net).values(), counts


def is_over_tp(parameter):
    """Whether tensor parallelism has sharded the parameter."""
    if not isinstance(parameter, DTensor):
        return False
    by_axis = dict(zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True))
    return "tp" in by_axis and not by_axis["tp"].is_replicate()


MESHES = ({"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 3})
OLDER = ({"data_parallel": 2, "tensor_parallel": 2}, {"data_parallel": 1, "context_parallel": 2})
BOTH = ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2})
REPLICAS = {"dp_replicate": 2}
LAYER = {"qwen3": "Qwen3", "llama": "Llama", "gemma": "Gemma"}


@pytest.mark.fast_values(2)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        *((mesh, STRATEGIES[0]) for mesh in (*MESHES, *OLDER)),
        *((mesh, name) for mesh in BOTH for name in STRATEGIES[1:]),
        (REPLICAS, "no_shard"),
    ],
    ids=str,
)
def test_three_steps_of_a_full_model(mesh, strategy):
    """Losses, every gradient, and every weight after three steps of AdamW, against JAX."""
    number = (*MESHES, *OLDER, REPLICAS).index(mesh)
    family = ("qwen3", "llama", "gemma")[number % 3]
    training = Training(Chosen(family, tied=number % 2 == 0), accumulation=2 if number % 2 else 1)

    def parallelize(model, device_mesh):
        layer = f"transformers.models.{family}.modeling_{family}.{LAYER[family]}DecoderLayer"
        has_tp = "tp" in device_mesh.mesh_dim_names or "tensor_parallel" in device_mesh.mesh_dim_names
        tensor_plan = get_hf_tp_shard_plan(model) if has_tp else None
        return nvfsdp_strategy_parallelize(model, device_mesh, [layer], tensor_plan, strategy)

    ranks, _ = on_mesh(mesh, training, parallelize)
    assert verdict(mesh, training, ranks, reference(training.chosen, training.batches)) == []


def on_ranks(body, **mesh):
    return run(body, CaseSpec(scheme="nvfsdp", mesh=mesh or {"dp_shard": 2}))


def gradients_and_weights(view, model=None, seed=0, **options):
    """Gradients and weights, as lists, after one backward and one step of AdamW."""
    torch.manual_seed(seed)
    net = nvfsdp_strategy_parallelize(model or Net().double(), view.device_mesh, **options)
    x = torch.linspace(-1, 1, 6, dtype=next(net.parameters()).dtype).view(2, 3) + view.rank("dp_shard")
    net(x).sum().backward()
    outcome = {name: each.tolist() for name, each in full_tensors(net, gradients=True).items()}
    torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False).step()
    return outcome, {name: each.tolist() for name, each in full_tensors(net).items()}


@pytest.mark.parametrize("switch", ["overlap_param_gather", "activation_checkpointing", "nvfsdp_unit_modules"])
def test_a_switch_that_changes_no_bit(switch):
    value = {"overlap_param_gather": False, "activation_checkpointing": True, "nvfsdp_unit_modules": [BLOCK]}[switch]

    def body(view, case):
        units = {} if switch == "nvfsdp_unit_modules" else {"nvfsdp_unit_modules": [BLOCK]}
        return gradients_and_weights(view, **units) == gradients_and_weights(view, **{**units, switch: value})

    assert on_ranks(body).results == (True, True)


def test_per_token_is_the_sum_over_the_data_ranks():
    def body(view, case):
        mean, total = gradients_and_weights(view)[0], gradients_and_weights(view, calculate_per_token_loss=True)[0]
        return all(torch.equal(torch.tensor(total[name]), 4 * torch.tensor(mean[name])) for name in mean)

    assert on_ranks(body, dp_shard=2, cp=2).results == (True,) * 4


def reductions(**options):
    """The op, dtype and reduce op of each reduction of gradients."""
    model = options.pop("model", None)
    mesh = options.pop("mesh", {"dp_shard": 2})
    rows = on_ranks(
        lambda view, case: gradients_and_weights(view, model() if model else None, **options) and None, **mesh
    ).ledger.rows
    sent = [row for row in rows if row.rank == 0 and row.phase == "bwd" and row.op in ("reduce_scatter", "all_reduce")]
    return [(row.op, row.dtypes[0], row.reduce_op) for row in sent if "int" not in row.dtypes[0]]


def half():
    return Net().bfloat16()


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ALIASES])
def test_bytes_of_each_strategy(strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = reductions(data_parallel_sharding_strategy=strategy, nvfsdp_unit_modules=[BLOCK])
    assert [op for op, _, _ in outcome] == ["all_reduce" if strategy == "no_shard" else "reduce_scatter"] * 3


def test_a_unit_of_each_module_reduces_by_itself():
    assert len(reductions(disable_bucketing=True)) == 5
    assert len(reductions()) == 1
    assert len(reductions(nvfsdp_unit_modules=[BLOCK])) == 3


def test_the_dtype_and_the_operation_of_a_reduction():
    assert {dtype for _, dtype, _ in reductions(model=half)} == {"bfloat16"}
    assert {dtype for _, dtype, _ in reductions(model=half, grad_reduce_in_fp32=True)} == {"float32"}
    assert {dtype for _, dtype, _ in reductions(grad_reduce_in_fp32=True)} == {"float64"}
    assert {op for _, _, op in reductions(model=half)} == {"SUM"}
    assert {op for _, _, op in reductions(model=half, average_in_collective=True)} == {"AVG"}
    assert {op for _, _, op in reductions(model=half, calculate_per_token_loss=True)} == {"SUM"}


def test_masters_are_float32_and_compute_in_sixteen_bits():
    seen = []

    def body(view, case):
        torch.manual_seed(0)
        net = half()
        net.blocks[0].up.register_forward_pre_hook(
            lambda module, args: seen.append((args[0].dtype, module.weight.dtype))
        )
        before = {name: p.detach().float() for name, p in net.named_parameters()}
        net = nvfsdp_strategy_parallelize(net, view.device_mesh, [BLOCK], preserve_fp32_weights=True)
        local = {name: to for name, to in full_tensors(net).items()}
        net(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        dtypes = {str(p.grad.dtype) for p in net.parameters()} | {str(v.dtype) for v in net.state_dict().values()}
        return dtypes, all(torch.equal(local[name], before[name]) for name in before)

    assert on_ranks(body).results == (({"torch.float32"}, True),) * 2
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}


def test_masters_of_wide_parameters_change_nothing():
    def body(view, case):
        return gradients_and_weights(view) == gradients_and_weights(view, preserve_fp32_weights=True)

    assert on_ranks(body).results == (True, True)


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_arguments_without_effect_natively_are_reported_by_name(name):
    def body(view, case):
        with pytest.warns(
            UserWarning, match=f"{name}=True needs megatron-fsdp on CUDA; backend='native' ignores it"
        ) as caught:
            nvfsdp_strategy_parallelize(Net(), view.device_mesh, **{name: True})
        return len(caught)

    assert on_ranks(body, dp_shard=1).results == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_grad_reduce": False}, "overlap_grad_reduce=False is ignored by backend='native'"),
        (
            {"overlap_param_gather": False, "data_parallel_sharding_strategy": "no_shard"},
            "overlap_param_gather=False is ignored with no_shard",
        ),
        ({"data_parallel_sharding_strategy": "params"}, "'params' is in no release and is read as"),
        (
            {"data_parallel_sharding_strategy": "grads_params"},
            "the releases have optim_grads_params, optim_grads, optim, no_shard",
        ),
    ],
)
def test_other_reports(options, message):
    def body(view, case):
        with pytest.warns(UserWarning, match=message):
            nvfsdp_strategy_parallelize(Net(), view.device_mesh, **options)
        return True

    assert on_ranks(body, dp_shard=1).results == (True,)


def test_a_layer_without_parameters_is_no_obstacle():
    def body(view, case):
        model = nn.Sequential(nn.Linear(3, 3), nn.SiLU(), nn.Linear(3, 1)).double()
        return len(gradients_and_weights(view, model, disable_bucketing=True)[0])

    assert on_ranks(body).results == (4, 4)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_weights_are_sharded_over_tp(strategy):
    """Replicated weights would give the same gradients, and take tp times the memory."""

    def body(view, case):
        net = nvfsdp_strategy_parallelize(Net(), view.device_mesh, [BLOCK], plan(), strategy)
        return {name: tuple(parameter.to_local().shape) for name, parameter in net.named_parameters()}

    up, down = (2, 3), (3, 2)
    shapes = dict(zip(NAMES, [up, down, up, down, (2, 3)], strict=True))
    assert on_ranks(body, dp_shard=1, tp=2).results == (shapes,) * 2


@pytest.mark.parametrize("overlaps", [True, False])
def test_which_units_are_gathered_ahead(overlaps):
    """Forward gathers the next unit ahead, backward the two before, the nearer one first. The root is in no list."""

    def body(view, case):
        layers = nn.Sequential(*[Block(3, 4) for _ in range(4)])
        net = nvfsdp_strategy_parallelize(layers, view.device_mesh, [BLOCK], overlap_param_gather=overlaps)
        states = [block._get_fsdp_state() for block in net]
        number = {id(state): i for i, state in enumerate(states)}
        return [
            (
                [number[id(s)] for s in state._states_to_forward_prefetch],
                [number[id(s)] for s in state._states_to_backward_prefetch],
            )
            for state in states
        ]

    ahead = [([1], []), ([2], [0]), ([3], [1, 0]), ([], [2, 1])] if overlaps else [([], [])] * 4
    assert on_ranks(body).results == (ahead,) * 2


def test_a_unit_that_is_sharded_over_tp_returns_no_view():
    """On a view FSDP would warn: an operation in place on the output would lose the backward."""

    def body(view, case):
        net = nvfsdp_strategy_parallelize(Net(), view.device_mesh, None, plan(), disable_bucketing=True)
        seen = []
        for name, module in net.named_modules():
            if name.endswith(("up", "down", "head")):
                module.register_forward_hook(lambda module, args, output: seen.append(output._is_view()))
        net(torch.ones(2, 3)).sum().backward()
        return seen

    assert on_ranks(body, dp_shard=1, tp=2).results == ([False] * 5,) * 2
