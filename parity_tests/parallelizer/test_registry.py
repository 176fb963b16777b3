"""Registration by a model's class, parameters gathered for a while, and the newer name of nvfsdp's function."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from parity_tests.parallelizer.families import Chosen, empty
from parity_tests.parallelizer.small_net import BLOCK, Net, plan
from parity_tests.parallelizer.styled import linear_layer
from parity_tests.parallelizer.training import broken, full_arrays
from shardproof import CaseSpec, scheme
from shardproof.engines.engines import run
from torch_impl.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    get_parallelization_strategy,
    hf_plan,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
    register_parallel_strategy,
    register_tp_plan,
    registry,
    unshard,
    unshard_fsdp2_model,
)
from torch_impl.parallelizer.tp_styles import Replicated


class Other(Net):
    pass


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    monkeypatch.setattr(hf_plan, "TP_PLANS", dict(hf_plan.TP_PLANS))
    monkeypatch.setattr(registry, "STRATEGIES", {})


def test_entries_of_a_class_and_of_its_bases():
    register_tp_plan(Net, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    register_tp_plan("Other", {"blocks.*.up": Replicated, "blocks.*.down": None})
    assert {key: type(style).__name__ for key, style in get_hf_tp_shard_plan(Net()).items()} == {
        "blocks.*.up": "ColwiseParallel",
        "blocks.*.down": "Rowwise",
    }
    assert {key: type(style) for key, style in get_hf_tp_shard_plan(Other()).items()} == {"blocks.*.up": Replicated}


def test_an_entry_wins_over_the_models_own_plan():
    model = empty(Chosen("llama"), device="meta")
    register_tp_plan("LlamaModel", {"layers.*.mlp.up_proj": None, "layers.*.mlp.down_proj": Replicated})
    registered = get_hf_tp_shard_plan(model)
    assert "model.layers.*.mlp.up_proj" not in registered
    assert type(registered["model.layers.*.mlp.down_proj"]) is Replicated
    assert "model.layers.*.mlp.gate_proj" in registered


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((3, {}), TypeError, "model_class=3 is an int; pass a class of torch.nn.Module, or its name"),
        ((int, {}), TypeError, "model_class=<class 'int'> is a type; pass a class of torch.nn.Module, or its name"),
        ((Net, ["up"]), TypeError, "plan is a list; pass a dict of module name -> style"),
        ((Net, {"up": 3}), TypeError, "plan['up'] is 3; pass the name of a style, a function that makes one, or None"),
        ((Net, {"up": "colwize"}), ValueError, "plan['up']='colwize' is not known; nearest: 'colwise'"),
        ((Net, {"up": "gather"}), ValueError, "plan['up']='gather' is a style of transformers 4; write all_reduce"),
    ],
)
def test_plans_that_cannot_be_registered(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(f"parallelizer.register_tp_plan: {message}")):
        register_tp_plan(*arguments)
    assert "Net" not in hf_plan.TP_PLANS


def test_the_strategy_of_a_class():
    assert get_parallelization_strategy(Net()) is fsdp2_strategy_parallelize

    @register_parallel_strategy(name="Net")
    def strategy(model, device_mesh, **options):
        return fsdp2_strategy_parallelize(model, device_mesh, **options)

    assert get_parallelization_strategy(Net()) is strategy
    assert get_parallelization_strategy(Other()) is strategy
    assert get_parallelization_strategy(nn.Linear(2, 2)) is fsdp2_strategy_parallelize
    with pytest.raises(TypeError, match="register_parallel_strategy: strategy=3 is an int; decorate a function"):
        register_parallel_strategy(name=Other)(3)
    with pytest.raises(TypeError, match="register_parallel_strategy: name=3 is an int; pass a class of"):
        register_parallel_strategy(3)


def full_inside(weight, entry):
    return weight


@scheme(
    reference=full_inside,
    mesh={"dp_shard": (1, 2)},
    inputs={"weight": "n i o dp_shard=I"},
    outputs="n i o dp_shard=I",
    dims={"n": (1, 3), "i": (1, 3), "o": (2,)},
    options={"entry": ("fsdp2", "nvfsdp", "none")},
    rank_options={"fails": (False, True)},
    nograd=("weight",),
    dtypes=("float64", "float32"),
    excluded_conditions=("strided", "autocast"),  # FSDP takes only contiguous parameters
)
@pytest.mark.cases(20)
def unsharded_parameters(mesh, weight, entry, fails):
    """Full parameters inside the context. After it they are shards again, also if an error was raised."""
    model = nn.Sequential(nn.ModuleList(linear_layer(each) for each in weight))
    if entry == "fsdp2":
        fsdp2_strategy_parallelize(model, mesh.device_mesh, MixedPrecisionPolicy())
    elif entry == "nvfsdp":
        nvfsdp_strategy_parallelize(model, mesh.device_mesh, ["torch.nn.Linear"])
    inside = weight[:0]
    try:
        with unshard(model):
            inside = torch.stack([local(parameter) for parameter in model.parameters()])
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    behind = [
        isinstance(parameter, DTensor) and parameter.placements == (Shard(0),) for parameter in model.parameters()
    ]
    assert behind == [entry != "none"] * len(behind)
    return inside


def local(parameter):
    """A copy of this rank's part of a parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()


def test_parameters_are_full_inside_and_sharded_behind():
    def body(view, case):
        torch.manual_seed(0)
        model = Net(d=4)
        full = {name: p.detach().clone() for name, p in model.named_parameters()}
        fsdp2_strategy_parallelize(model, view.device_mesh, MixedPrecisionPolicy())
        with unshard(model):
            inside = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(RuntimeError, match="inside"), unshard_fsdp2_model(model):
            raise RuntimeError("inside")
        shards = [p.placements[0].is_shard() for p in model.parameters()]
        return all(torch.equal(inside[name], full[name]) for name in full), all(shards)

    ranks = run(body, CaseSpec("unshard", {"dp_shard": 2}, dtype="float32"))
    assert ranks.results == ((True, True),) * 2
    with unshard(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("function", [unshard, unshard_fsdp2_model])
def test_values_that_are_no_module_are_rejected_at_the_call(function):
    with pytest.raises(TypeError, match=r"unshard_fsdp2_model: model is an int; pass a torch\.nn\.Module"):
        function(3)


def step(parallelize):
    """The weights of a net after one step of an optimizer, which is made before the net is (or is not) sharded."""

    def body(view, case):
        torch.manual_seed(0)
        net = Net(d=4).double()
        model, optimizer = parallelize(net, view.device_mesh)
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        return full_arrays(model)

    return run(body, CaseSpec("step", {"dp_shard": 2, "tp": 2}, dtype="float64")).results[0]


@pytest.mark.fast_values(1)
@pytest.mark.parametrize(
    ("stage", "name"), [(3, "optim_grads_params"), (2, "optim_grads"), (1, "optim"), (0, "no_shard")]
)
def test_the_newer_name_is_the_older_function(stage, name):
    def older(net, mesh):
        model = nvfsdp_strategy_parallelize(
            net, mesh, nvfsdp_unit_modules=[BLOCK], tp_shard_plan=plan(), data_parallel_sharding_strategy=name
        )
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def newer(net, mesh):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return megatron_fsdp_strategy_parallelize(net, mesh, optimizer, [BLOCK], plan(), stage)

    assert broken(step(newer), step(older)) == []


def test_an_optimizer_that_cannot_be_moved():
    def body(view, case):
        net = Net()
        others = torch.optim.SGD(Net().parameters(), 0.1)
        with pytest.raises(ValueError, match="optimizer: has a parameter that is not in the model"):
            megatron_fsdp_strategy_parallelize(net, view.device_mesh, others)
        stepped = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 3)).sum().backward()
        stepped.step()
        with pytest.raises(ValueError, match="optimizer: has state of parameters that are not sharded yet"):
            megatron_fsdp_strategy_parallelize(net, view.device_mesh, stepped)
        with pytest.raises(ValueError, match="zero_dp_strategy=4 is not one of 0, 1, 2, 3"):
            megatron_fsdp_strategy_parallelize(net, view.device_mesh, zero_dp_strategy=4)
        assert megatron_fsdp_strategy_parallelize(net, view.device_mesh)[1] is None

    run(body, CaseSpec("optimizer", {"dp_shard": 2}))
