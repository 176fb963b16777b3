"""Values for a model on the meta device: the same on every mesh, and nothing left without one."""

import itertools

import pytest
import torch
from torch import nn

from parity_tests.parallelizer.families import Chosen, empty
from parity_tests.parallelizer.meta_values import AXES, SEED, UNITS, alone, names_of_other_values, net_on_meta
from parity_tests.parallelizer.small_net import Net, full_tensors
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer import get_hf_tp_shard_plan
from torch_impl.parallelizer.adapters.megatron import STRATEGIES
from torch_impl.parallelizer.adapters.nvfsdp import nvfsdp_strategy_parallelize


def other_values(mesh, case):
    return names_of_other_values(mesh.device_mesh[AXES], **case.options)


@pytest.mark.parametrize("units", ["blocks", "modules"])
def test_values_do_not_depend_on_the_units(units):
    options = {"strategy": STRATEGIES[0], "units": units, "seed": "small"}
    case = CaseSpec(scheme="meta", mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 1}, options=options)
    assert run(other_values, case).results == ([],) * 2


@pytest.mark.fast_values(1)
@pytest.mark.parametrize("units", UNITS)
def test_values_of_a_meta_model_on_processes(units):
    options = {"strategy": STRATEGIES[-1], "units": units, "seed": "large"}
    case = CaseSpec(scheme="meta", mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 2}, options=options, engine="gloo")
    assert run(other_values, case, "gloo").results == ([],) * 4


ROWS = 3
BEGIN = "init_nvfsdp_with_meta_device"


class PartlyFilled(nn.Module):
    """A layer whose initialisation fills its first rows alone; None is a layer without an initialisation."""

    def __init__(self, filled):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, 2))
        if filled is not None:
            self.reset_parameters = lambda: self.weight[:filled].fill_(1)


def problem_of_initialisation(on_meta, expected, filled):
    """The beginning of the first message about two layers, which fill so many rows or have no initialisation."""
    if on_meta != expected:
        return f"{BEGIN}={expected}, and "
    if not on_meta:
        return ""
    without = [f"{BEGIN}: '{i}' has parameters but no reset_parameters" for i in (0, 1) if filled[i] is None]
    partly = [f"{BEGIN}: '{i}.weight' has no value after the initialisation" for i in (0, 1) if filled[i] != ROWS]
    return (without or partly or [""])[0]


FILLED = (ROWS, 1, 0, None)
MODELS = list(itertools.product((True, False), (True, False), itertools.product(FILLED, repeat=2)))


@pytest.mark.fast_values(60)
@pytest.mark.parametrize(("on_meta", "expected", "filled"), MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_layer_that_cannot_be_initialised_is_named(on_meta, expected, filled, ranks):
    def body(mesh, case):
        with torch.device("meta" if on_meta else "cpu"):
            model = nn.Sequential(*map(PartlyFilled, filled))
        try:
            nvfsdp_strategy_parallelize(model, mesh.device_mesh, init_nvfsdp_with_meta_device=expected)
        except ValueError as error:
            return str(error)
        return ""

    beginning = problem_of_initialisation(on_meta, expected, filled)
    for sentence in on_ranks(body, dp_shard=ranks).results:
        assert sentence.startswith(beginning) and bool(sentence) == bool(beginning), sentence


def on_ranks(body, **mesh):
    return run(body, CaseSpec(scheme="meta", mesh=mesh or {"dp_shard": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [Chosen("qwen3", tied=True), Chosen("gemma"), Chosen("phi3")], ids=str)
def test_a_model_of_transformers(chosen):
    """Parameters and buffers, such as the angles of its rotation, as one process initialises them; ties kept."""
    layer = f"transformers.models.{chosen.family}.modeling_{chosen.family}.{chosen.family.capitalize()}DecoderLayer"

    def body(mesh, case):
        torch.manual_seed(SEED)
        model = empty(chosen, device="meta")
        tensor_plan = get_hf_tp_shard_plan(model)
        model = nvfsdp_strategy_parallelize(
            model, mesh.device_mesh, [layer], tensor_plan, init_nvfsdp_with_meta_device=True
        )
        single = empty(chosen, device="meta")
        outcome, expected = full_tensors(model), alone(single)
        meta_model = empty(chosen)
        buffers = all(torch.equal(a, b) for a, b in zip(model.buffers(), meta_model.buffers(), strict=True))
        is_tied = (model.lm_head.weight is model.model.embed_tokens.weight) == chosen.tied
        same = all(torch.equal(outcome[name], expected[name]) for name in expected)
        return same, buffers, is_tied, all(v.std() > 0 for name, v in outcome.items() if "proj" in name)

    assert on_ranks(body, dp_shard=2, tp=2).results == ((True,) * 4,) * 4


def test_each_module_has_its_values():
    first, second = (alone(net_on_meta())[f"blocks.{block}.up.weight"] for block in range(2))
    assert first.shape == second.shape and not (first == second).any()


def test_a_buffer_that_has_values_keeps_them():
    net = net_on_meta()
    net.register_buffer("known", torch.arange(3.0))
    net.register_buffer("none", None)
    net.register_buffer("expected", torch.empty(2, dtype=torch.int64, device="meta"))
    alone(net)
    assert torch.equal(net.known, torch.arange(3.0)) and net.none is None and net.expected.device.type == "cpu"


def test_the_generator_of_the_process_is_left_as_it_was():
    before = torch.get_rng_state()
    alone(net_on_meta())
    assert torch.equal(before, torch.get_rng_state())


def test_no_other_generator_is_seeded(monkeypatch):
    seeded = []
    for name in ("cuda", "mps", "xpu"):
        module = getattr(torch, name)
        for each in ("manual_seed", "manual_seed_all"):
            if hasattr(module, each):
                monkeypatch.setattr(module, each, seeded.append)
    alone(net_on_meta())
    assert seeded == []


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Forgets(Bare):
    def reset_parameters(self):
        pass


@pytest.mark.parametrize(
    ("factory", "on_meta", "flag", "message"),
    [
        (Net, False, True, "init_nvfsdp_with_meta_device=True, and no parameter is on the meta device"),
        (Net, True, False, "init_nvfsdp_with_meta_device=False, and 'blocks.0.up.weight' is on the meta device"),
        (Bare, True, True, "init_nvfsdp_with_meta_device: 'Bare' has parameters but no reset_parameters"),
        (Forgets, True, True, "init_nvfsdp_with_meta_device: '.weight' has no value after the initialisation of"),
    ],
)
def test_modules_that_cannot_be_initialised(factory, on_meta, flag, message):
    def body(mesh, case):
        with torch.device("meta" if on_meta else "cpu"):
            model = factory()
        with pytest.raises(ValueError, match=message):
            nvfsdp_strategy_parallelize(model, mesh.device_mesh, init_nvfsdp_with_meta_device=flag)
        return True

    assert on_ranks(body).results == (True, True)
