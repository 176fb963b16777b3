"""The library of each backend, and its names for our arguments."""

import inspect
import itertools
import sys
import types
import warnings
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from parity_tests.parallelizer.small_net import BLOCK, NAMES, Block, Net, plan
from parity_tests.parallelizer.styled import linear_layer
from shardproof import CaseSpec
from shardproof.draw.profiles import few
from shardproof.engines.engines import run
from torch_impl.parallelizer.adapters import nvfsdp
from torch_impl.parallelizer.adapters.megatron import (
    Settings,
    choose_backend,
    has_function,
    with_megatron_fsdp,
    with_nvfsdp,
)
from torch_impl.parallelizer.adapters.nvfsdp import HAVE_NVFSDP, nvfsdp_strategy_parallelize
from torch_impl.parallelizer.mesh_axes import mesh_axes

GIVEN = Settings("optim", False, True, True, True, False, True, False, True, True, True, False, True, False)


def library(name, monkeypatch, **contents):
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_library_is_there_if_its_function_can_be_imported(monkeypatch, tmp_path):
    assert not has_function("a_library_that_is_not_there", "fully_shard")
    library("empty_library", monkeypatch)
    assert not has_function("empty_library", "fully_shard")
    library("full_library", monkeypatch, fully_shard=print)
    assert has_function("full_library", "fully_shard")
    for number, line in enumerate(("raise OSError('libcuda.so')", "raise ImportError('torch')")):
        (tmp_path / f"broken_{number}.py").write_text(line)
        monkeypatch.syspath_prepend(tmp_path)
        assert not has_function(f"broken_{number}", "fully_shard")
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        has_function("interrupted", "fully_shard")
    assert has_function("nvfsdp", "fully_shard") == HAVE_NVFSDP


def test_the_library_of_each_backend(monkeypatch):
    assert [choose_backend("auto", device, True) for device in ("cuda", "cpu")] == ["nvfsdp", "native"]
    assert choose_backend("native", "cuda", True) == "native"
    with pytest.raises(ValueError, match="backend='nvfsdp': needs CUDA, and device_mesh is on 'cpu'"):
        choose_backend("nvfsdp", "cpu", True)
    with pytest.raises(ImportError, match=r"backend='nvfsdp': nvfsdp\.fully_shard is not installed"):
        choose_backend("nvfsdp", "cuda", False)
    monkeypatch.setitem(sys.modules, "megatron_fsdp", None)
    assert choose_backend("auto", "cuda", False) == "native"
    with pytest.raises(ImportError, match=r"needs megatron-fsdp; pip install -e '\.\[megatron\]' in the clone"):
        choose_backend("megatron_fsdp", "cuda", False)
    library("megatron_fsdp", monkeypatch, fully_shard_model=print)
    assert [choose_backend("auto", device, False) for device in ("cuda", "cpu")] == ["megatron_fsdp", "native"]
    with pytest.raises(ValueError, match="backend='megatron_fsdp': needs CUDA"):
        choose_backend("megatron_fsdp", "cpu", False)


@dataclass
class Policy:
    main_params_dtype: torch.dtype | None
    main_grads_dtype: torch.dtype | None
    grad_comm_dtype: torch.dtype | None


def fully_shard_model(
    module,
    device_mesh=None,
    dp_shard_dim=None,
    dp_outer_dim=None,
    tp_dim=None,
    hybrid_fsdp_group=None,
    fsdp_unit_modules=None,
    zero_dp_strategy=3,
    init_model_with_meta_device=False,
    mixed_precision_policy=None,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    report_nan_in_param_grad=False,
    average_in_collective=False,
    disable_bucketing=False,
    calculate_per_token_loss=False,
    keep_fp8_transpose_cache=False,
    nccl_ub=False,
    fsdp_double_buffer=False,
):
    """The parameters of megatron-fsdp 0.6.1 that the adapter passes."""
    wrapped = nn.Identity()
    wrapped.passed = dict(locals())
    return wrapped


@pytest.mark.parametrize(("replicas", "shards", "cp"), list(itertools.product((1, 2), repeat=3)))
def test_groups_for_megatron_fsdp(replicas, shards, cp, monkeypatch):
    """The library gets the axis of replicas, the group of replicas and shards, and the ranks that shard."""

    def axes_of(mesh):
        axes = mesh_axes(mesh.device_mesh)
        # Made here, because making a mesh sends messages, and none may be sent while a fake library is in place.
        _ = axes.loss_mesh, axes.shard_mesh
        return axes

    library("megatron_fsdp", monkeypatch, fully_shard_model=fully_shard_model, MixedPrecisionPolicy=Policy)

    def body(mesh, case):
        axes = axes_of(mesh)
        passed = with_megatron_fsdp(nn.Identity(), axes, GIVEN, []).passed
        group = passed["hybrid_fsdp_group"]
        assert axes.shard_mesh.mesh_dim_names == (passed["dp_shard_dim"],)
        return passed["dp_outer_dim"], None if group is None else group.size(), axes.shard_mesh.size()

    sizes = {"dp_replicate": replicas, "dp_shard": shards, "cp": cp}
    several = replicas > 1
    expected = "dp_replicate" if several else None, replicas * shards * cp if several else None, shards * cp
    assert run(body, CaseSpec(scheme="megatron", mesh=sizes)).results == (expected,) * (replicas * shards * cp)


STRATEGY_NAMES = ("optim_grads_params", "optim_grads", "optim", "no_shard", "params", "grads_params", "zero3")
ON_CUDA_ALONE = ("nccl_ub", "fsdp_double_buffer", "keep_fp8_transpose_cache_when_using_custom_fsdp")
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")  # on by default, all others off
CHANGED = (*ON_CUDA_ALONE, *OVERLAPS, "calculate_per_token_loss", "average_in_collective")


def expected_reports(strategy, first, second):
    """(the arguments with a warning, the rejected argument or None); a rejected call gives no warning."""
    changed = {first, second}
    if strategy == "zero3":
        return [], "data_parallel_sharding_strategy"
    if changed == {"calculate_per_token_loss", "average_in_collective"}:
        return [], "calculate_per_token_loss"
    warned = [name for name in (*ON_CUDA_ALONE, "overlap_grad_reduce") if name in changed]
    warned += ["data_parallel_sharding_strategy"] if strategy in ("params", "grads_params") else []
    warned += ["overlap_param_gather"] if "overlap_param_gather" in changed and strategy == "no_shard" else []
    return sorted(warned), None


@settings(max_examples=few(25))
@given(st.sampled_from((1, 2)), st.sampled_from(STRATEGY_NAMES), st.sampled_from(CHANGED), st.sampled_from(CHANGED))
def test_arguments_that_are_reported(ranks, strategy, first, second):
    """Two arguments are not at their defaults; no other argument has a warning."""
    switches = {name: name not in OVERLAPS for name in (first, second)}

    def body(mesh, case):
        model, rejection = nn.Sequential(linear_layer(torch.ones(2, 2))), None
        caught = []
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                nvfsdp_strategy_parallelize(
                    model, mesh.device_mesh, data_parallel_sharding_strategy=strategy, **switches
                )
        except ValueError as error:
            rejection = str(error).partition("=")[0]
        return sorted(str(each.message).partition("=")[0] for each in caught), rejection

    ranks_seen = run(body, CaseSpec(scheme="megatron", mesh={"dp_shard": ranks}))
    assert ranks_seen.results == (expected_reports(strategy, first, second),) * ranks
    assert ranks_seen.ledger.rows == []


def test_every_argument_reaches_megatron_fsdp(monkeypatch):
    library("megatron_fsdp", monkeypatch, fully_shard_model=fully_shard_model, MixedPrecisionPolicy=Policy)

    def body(mesh, case):
        axes, model = mesh_axes(mesh.device_mesh), Net()
        passed = with_megatron_fsdp(model, axes, GIVEN, []).passed
        group = passed["hybrid_fsdp_group"]
        assert passed["module"] is model and passed["fsdp_unit_modules"] == [Net] and passed["device_mesh"] is axes.mesh
        assert passed["mixed_precision_policy"] == Policy(torch.float32, torch.float32, torch.float32)
        names = ("dp_shard_dim", "dp_outer_dim", "tp_dim", "zero_dp_strategy", "overlap_param_gather", "nccl_ub")
        names += ("report_nan_in_param_grad", "keep_fp8_transpose_cache", "fsdp_double_buffer", "disable_bucketing")
        return None if group is None else group.size(), [passed[name] for name in names]

    switches = ["optim", False, False, True, True, True, True]
    replicas = run(body, CaseSpec(scheme="megatron", mesh={"dp_replicate": 2, "dp_shard": 2})).results
    assert replicas == ((4, ["dp_shard", "dp_replicate", None, *switches]),) * 4
    flat = run(body, CaseSpec(scheme="megatron", mesh={"dp_shard": 2, "cp": 2, "tp": 1})).results
    assert flat == ((None, ["dp_shard_cp", None, "tp", *switches]),) * 4
    single = run(body, CaseSpec(scheme="megatron", mesh={"dp_replicate": 1, "dp_shard": 2})).results
    assert single == ((None, ["dp_shard", None, None, *switches]),) * 2


OURS = [field.name for field in fields(Settings)]
SWITCHES = {name: {name: True} for name in OURS if name not in (OURS[0], "activation_checkpointing")}
SWITCHES["init_nvfsdp_with_meta_device"] = {"init_model_with_meta_device": True}
MEGATRON_SWITCHES = SWITCHES | {
    "grad_reduce_in_fp32": {"mixed_precision_policy": Policy(None, torch.float32, torch.float32)},
    "preserve_fp32_weights": {"mixed_precision_policy": Policy(torch.float32, None, None)},
    "check_for_nan_in_grad": {"report_nan_in_param_grad": True},
    "keep_fp8_transpose_cache_when_using_custom_fsdp": {"keep_fp8_transpose_cache": True},
}


@pytest.mark.parametrize(("wrap", "expected"), [(with_megatron_fsdp, MEGATRON_SWITCHES), (with_nvfsdp, SWITCHES)])
def test_each_switch_alone_is_passed_under_its_name(wrap, expected, monkeypatch):
    library("megatron_fsdp", monkeypatch, fully_shard_model=fully_shard_model, MixedPrecisionPolicy=Policy)
    library("nvfsdp", monkeypatch, fully_shard=lambda **passed: types.SimpleNamespace(passed=passed))

    def body(mesh, case):
        axes, model = mesh_axes(mesh.device_mesh), Net()

        def passed(**switches):
            settings = Settings(**{OURS[0]: "optim"}, **{name: switches.get(name, False) for name in OURS[1:]})
            return {name: x for name, x in wrap(model, axes, settings, []).passed.items() if name != "wrapped"}

        off = passed().items()
        return {
            name: {each: x for each, x in passed(**{name: True}).items() if (each, x) not in off} for name in expected
        }

    assert run(body, CaseSpec(scheme="megatron", mesh={"dp_shard": 1})).results == (expected,)


def test_a_library_gets_a_model_that_is_sharded_and_checkpointed(monkeypatch):
    """As on CUDA: the library gets the model after tensor parallelism."""
    library("megatron_fsdp", monkeypatch, fully_shard_model=fully_shard_model, MixedPrecisionPolicy=Policy)
    monkeypatch.setattr(nvfsdp, "choose_backend", lambda *_: "megatron_fsdp")

    def body(mesh, case):
        switches = {"activation_checkpointing": True, "check_for_nan_in_grad": False}
        passed = nvfsdp_strategy_parallelize(Net(), mesh.device_mesh, [BLOCK], plan(), "optim", **switches).passed
        net = passed["module"]
        sharded = [name for name, parameter in net.named_parameters() if isinstance(parameter, DTensor)]
        recomputed = [name for name, module in net.named_modules() if "forward" in vars(module)]
        return sharded, recomputed, passed["fsdp_unit_modules"] == [Block], passed["zero_dp_strategy"]

    expected = (list(NAMES[:4]), ["blocks.0", "blocks.1"], True, "optim")
    assert run(body, CaseSpec(scheme="megatron", mesh={"dp_shard": 1, "tp": 2})).results == (expected,) * 2


def test_every_argument_reaches_nvfsdp(monkeypatch):
    library("nvfsdp", monkeypatch, fully_shard=lambda **passed: passed)

    def body(mesh, case):
        passed = with_nvfsdp(Net(), mesh_axes(mesh.device_mesh), GIVEN, [nn.Linear])
        assert passed["fsdp_unit_modules"] == [nn.Linear] and passed["data_parallel_sharding_strategy"] == "optim"
        return passed["dp_cp_group"].size(), sum(isinstance(value, bool) for value in passed.values())

    assert run(body, CaseSpec(scheme="nvfsdp", mesh={"dp_shard": 2})).results == ((2, 12),) * 2


def rejected(error, message, model=None, **options):
    def body(mesh, case):
        with pytest.raises(error, match=message):
            nvfsdp_strategy_parallelize(model() if model else Net(), mesh.device_mesh, **options)
        return True

    ranks = run(body, CaseSpec(scheme="nvfsdp", mesh={"dp_shard": 2}))
    assert ranks.results == (True, True) and ranks.ledger.rows == []


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


def two_dtypes():
    net = Net()
    net.head = net.head.bfloat16()
    return net


STRATEGY = (
    r"data_parallel_sharding_strategy='zero3' is not known; use one of optim_grads_params, optim_grads, optim, no"
)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, STRATEGY, {"data_parallel_sharding_strategy": "zero3"}),
        (TypeError, "data_parallel_sharding_strategy=3 is an int; pass a str", {"data_parallel_sharding_strategy": 3}),
        (ValueError, "backend='cuda' is not one of auto, native, megatron_fsdp, nvfsdp", {"backend": "cuda"}),
        (ImportError, "backend='nvfsdp': nvfsdp.fully_shard is not installed", {"backend": "nvfsdp"}),
        (TypeError, "nccl_ub=1 is an int; pass True or False", {"nccl_ub": 1}),
        (
            ValueError,
            "calculate_per_token_loss=True sums gradients and average_in_collective=True",
            {"calculate_per_token_loss": True, "average_in_collective": True},
        ),
        (ValueError, "has no instance of 'torch.nn.GRU'; it has", {"nvfsdp_unit_modules": [BLOCK, "torch.nn.GRU"]}),
        (
            TypeError,
            "nvfsdp_unit_modules='torch.nn.Linear' is a str; pass a list of paths",
            {"nvfsdp_unit_modules": "torch.nn.Linear"},
        ),
        (
            ValueError,
            "disable_bucketing=True makes a unit of each module, and 'a.weight' and 'b.weight' share",
            {"disable_bucketing": True, "model": Tied},
        ),
        (
            ValueError,
            "'blocks.0.up.weight' is torch.float32 and 'head.weight' is torch.bfloat16, both in one unit",
            {"model": two_dtypes, "preserve_fp32_weights": True},
        ),
    ],
)
def test_rejections_before_anything_is_sent(error, message, options):
    rejected(error, message, **options)


def test_units_of_two_dtypes_are_separate():
    def body(mesh, case):
        net = nvfsdp_strategy_parallelize(two_dtypes(), mesh.device_mesh, [BLOCK], preserve_fp32_weights=True)
        return sorted({str(parameter.dtype) for parameter in net.parameters()})

    assert run(body, CaseSpec(scheme="nvfsdp", mesh={"dp_shard": 2})).results == (["torch.float32"],) * 2


def test_the_outermost_instance_is_the_unit():
    def body(mesh, case):
        net = nvfsdp_strategy_parallelize(Net(), mesh.device_mesh, ["torch.nn.Linear", BLOCK])
        return [name for name, module in net.named_modules() if type(module).__name__.startswith("FSDP")]

    want = ["", "blocks.0", "blocks.1", "head"]
    assert run(body, CaseSpec(scheme="nvfsdp", mesh={"dp_shard": 2})).results == (want,) * 2


PAGE = {
    "nvfsdp_unit_modules": None,
    "tp_shard_plan": None,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "init_nvfsdp_with_meta_device": False,
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
}


def test_the_signature_matches_the_page_with_our_own_arguments_last():
    parameters = inspect.signature(nvfsdp_strategy_parallelize).parameters
    positional = {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional) == ["model", "device_mesh", *PAGE]
    assert {name: positional[name] for name in PAGE} == PAGE
    ours = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert ours == {"activation_checkpointing": False, "backend": "auto"}
