"""Options of fsdp2_strategy_parallelize that change no number: the effect of each, with unchanged gradients."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from parity_tests.parallelizer.configurations import alone, configuration, judged, mistakes, on_rank
from parity_tests.parallelizer.families import Chosen, model_of
from parity_tests.parallelizer.small_net import Net, plan
from parity_tests.parallelizer.training import full_arrays, parallelized
from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer import fsdp2_strategy_parallelize, get_hf_tp_shard_plan
from torch_impl.parallelizer.blocks import units
from torch_impl.parallelizer.mesh_axes import ARGUMENTS, mesh_axes

LLAMA = Chosen("llama", changes=(("num_hidden_layers", 4),))
ONE = {"dp_shard": 1}


class CountProducts(TorchDispatchMode):
    """How many products of matrices are computed."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def products(**switches):
    """Products of a forward and backward, and every gradient."""

    def body(view, case):
        model = parallelized(**switches)(model_of(LLAMA), view.device_mesh)
        with CountProducts() as counted:
            model(input_ids=torch.arange(8).view(2, 4)).logits.square().mean().backward()
        return counted.count, full_arrays(model, gradients=True)

    return run(body, CaseSpec("products", ONE, dtype="float64")).results[0]


def save_all(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def save_nothing(context, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.slow
def test_each_scope_recomputes_its_blocks_and_changes_no_bit():
    """Products are counted: so many more than without as the recomputed blocks have."""
    without, gradients = products()
    scopes = {
        "full": ({"activation_checkpointing": "full"}, 4),
        "each": ({"activation_checkpointing": True}, 4),
        "every second": ({"activation_checkpointing": "selective", "selective_ac_option": 2}, 2),
        "every third": ({"activation_checkpointing": "selective", "selective_ac_option": 3}, 2),
        "by op": ({"activation_checkpointing": "selective"}, 0),
        "all saved": ({"activation_checkpointing": "selective", "selective_ac_option": save_all}, 0),
        "none saved": ({"activation_checkpointing": "selective", "selective_ac_option": save_nothing}, 4),
    }
    (full, _), *_ = [products(activation_checkpointing=True)]
    of_a_block = (full - without) // 4
    assert of_a_block > 0 and (full - without) % 4 == 0
    for name, (switches, blocks) in scopes.items():
        count, recomputed = products(**switches)
        assert count - without == blocks * of_a_block, name
        assert all((recomputed[key] == gradients[key]).all() for key in gradients), name


@pytest.mark.parametrize(
    ("switches", "kind", "message"),
    [
        (
            {"activation_checkpointing": "some"},
            ValueError,
            "activation_checkpointing='some' is not known; pass True or",
        ),
        ({"activation_checkpointing": 2}, TypeError, "activation_checkpointing=2 is an int; pass True or False"),
        ({"selective_ac_option": 0}, ValueError, "selective_ac_option=0 must be at least 1"),
        ({"selective_ac_option": "ops"}, TypeError, "selective_ac_option='ops' is a str; pass 'op', n for each n-th"),
        ({"fsdp2_forward_prefetch_depth": -1}, ValueError, "fsdp2_forward_prefetch_depth=-1 must be at least 0"),
        (
            {"tp_shard_plan": "plan"},
            ValueError,
            "tp_shard_plan='plan' is not an import path; write 'package.module:NAME'",
        ),
        (
            {"tp_shard_plan": ".plans:PLAN"},
            ValueError,
            "tp_shard_plan='.plans:PLAN' is relative, and there is no package to begin at; write 'package.module:NAME'",
        ),
        (
            {"compile_backend": "induct"},
            ValueError,
            "compile_backend='induct' is not a backend.*; nearest: 'inductor'",
        ),
        ({"compile_backend": 3}, TypeError, "compile_backend=3 is an int; pass the name of a backend"),
        ({"tp_shard_plan": "no_package.x:plan"}, ValueError, "no module 'no_package'; install it or correct the path"),
        (
            {"tp_shard_plan": "parity_tests.parallelizer.small_net:plam"},
            ValueError,
            "has no 'plam'; nearest: 'plan'",
        ),
        (
            {"tp_shard_plan": "parity_tests.parallelizer.small_net:NAMES"},
            TypeError,
            r"NAMES' is a tuple; pass a dict of module name -> ParallelStyle",
        ),
    ],
)
def test_rejections(switches, kind, message):
    def body(view, case):
        with pytest.raises(kind, match=message):
            fsdp2_strategy_parallelize(Net(), view.device_mesh, **switches)

    assert run(body, CaseSpec("rejected", {"dp_shard": 2})).ledger.rows == []


@pytest.mark.parametrize(
    "path", ["parity_tests.parallelizer.small_net:plan", "parity_tests.parallelizer.small_net.plan"]
)
def test_a_plan_by_its_import_path(path):
    def body(view, case):
        models = []
        for given in (path, plan()):
            torch.manual_seed(0)
            models.append(fsdp2_strategy_parallelize(Net(d=4), view.device_mesh, tp_shard_plan=given))
        one, two = ({name: p.placements for name, p in model.named_parameters()} for model in models)
        return one == two and any(each[-1].is_shard() for each in one.values())

    assert all(run(body, CaseSpec("path", {"dp_shard": 1, "tp": 2})).results)


def test_a_plan_that_is_a_function_of_the_model():
    path = f"{get_hf_tp_shard_plan.__module__}:get_hf_tp_shard_plan"

    def body(view, case):
        model = fsdp2_strategy_parallelize(model_of(Chosen("llama")), view.device_mesh, tp_shard_plan=path)
        return model.model.layers[0].mlp.down_proj.weight.placements[-1].is_shard(1)

    assert all(run(body, CaseSpec("function", {"dp_shard": 1, "tp": 2}, dtype="float64")).results)


NAMES = {"replicate": "copies", "shard": "shards", "tp": "tensor"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"copies": 2, "shards": 2}, {"shards": 2, "tensor": 2}, {"tensor": 2}], ids=str)
def test_names_of_a_mesh(mesh):
    """The same gradients under a caller's own names; the rows of a rank follow from its axes of data."""
    chosen = configuration("qwen3")
    roles = {role: name for role, name in NAMES.items() if name in mesh}

    def body(view, case):
        return on_rank(view, chosen, own_names=roles, **{ARGUMENTS[role]: name for role, name in roles.items()})

    ranks = run(body, CaseSpec("names", mesh, dtype="float64")).results
    assert mistakes(chosen, {"tp" if axis == "tensor" else axis: size for axis, size in mesh.items()}, ranks) == []
    assert alone(chosen).loss > 0


@pytest.mark.parametrize("argument", ARGUMENTS.values())
def test_a_name_that_is_no_axis(argument):
    message = re.escape(
        f"{argument}='tensr' is not an axis of device_mesh, which has 'dp_replicate', 'tp'; pass one of these names, "
        f"or leave {argument} out if the mesh has no such axis"
    )

    def body(view, case):
        with pytest.raises(ValueError, match=message):
            fsdp2_strategy_parallelize(Net(), view.device_mesh, tp_shard_plan=plan(), **{argument: "tensr"})

    assert run(body, CaseSpec("axis", {"dp_replicate": 1, "tp": 2})).ledger.rows == []


def test_a_name_of_axes_that_are_not_flattened_yet():
    def body(view, case):
        with pytest.raises(ValueError, match="dp_shard_cp_mesh_name='shards' is not an axis of device_mesh"):
            mesh_axes(view.device_mesh, {"shard": "shards"})
        return mesh_axes(view.device_mesh, {"shard": "dp_shard_cp"}).shard_mesh.size()

    assert run(body, CaseSpec("flattened", {"dp_shard": 2, "cp": 2})).results == (4,) * 4


def test_one_role_twice():
    def body(view, case):
        with pytest.raises(ValueError, match=r"have one role twice, with 'tensor'; rename one"):
            mesh_axes(view.device_mesh, {"tp": "tensor"})
        with pytest.raises(ValueError, match=r"axis 'tensor' of .* is not known"):
            mesh_axes(view.device_mesh)

    run(body, CaseSpec("twice", {"tp": 1, "tensor": 1}))


def test_a_flattened_axis_by_its_name():
    def body(view, case):
        mesh = view.device_mesh
        mesh["dp_shard", "cp"]._flatten("shards")
        axes = mesh_axes(mesh, {"shard": "shards"})
        return axes.shard_mesh.mesh_dim_names, axes.shard_mesh.size()

    assert run(body, CaseSpec("flattened", {"dp_shard": 2, "cp": 2})).results == ((("shards",), 4),) * 4


def test_cp_alone_goes_by_the_name_of_data_and_cp():
    def body(view, case):
        return mesh_axes(view.device_mesh, {"shard": "dp_shard_cp"}).shard_mesh.size()

    assert run(body, CaseSpec("cp_alone", {"cp": 2})).results == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("depths", [(0, 0), (1, 2), (3, 3)])
def test_prefetching_changes_no_gradient(mesh, depths):
    switches = dict(zip(("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth"), depths, strict=True))
    assert judged(configuration("llama"), mesh, **switches) == []


def test_so_many_blocks_ahead_are_gathered():
    def body(view, case):
        model = parallelized(fsdp2_forward_prefetch_depth=1, fsdp2_backward_prefetch_depth=2)(
            model_of(LLAMA), view.device_mesh
        )
        states = [group[0]._get_fsdp_state() for group in units(model)]
        number = {id(state): i for i, state in enumerate(states)}
        return [
            (
                [number[id(s)] for s in state._states_to_forward_prefetch],
                [number[id(s)] for s in state._states_to_backward_prefetch],
            )
            for state in states
        ]

    ahead = [([1], []), ([2], [0]), ([3], [1, 0]), ([], [2, 1])]
    assert run(body, CaseSpec("ahead", {"dp_shard": 2}, dtype="float64")).results == (ahead,) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "family"),
    [({"dp_shard": 2}, "llama"), pytest.param({"tp": 2}, "qwen3", marks=pytest.mark.slow)],
    ids=str,
)
def test_compiled_blocks_on_processes(mesh, family):
    """Traced and differentiated by the compiler, run by torch's operations: a machine may lack a C compiler."""
    chosen, recomputed = configuration(family), "tp" not in mesh

    def body(view, case):
        switches = {"activation_checkpointing": recomputed, "enable_compile": True, "compile_backend": "aot_eager"}
        return on_rank(view, chosen, **switches)

    ranks = run(body, CaseSpec("compiled", mesh, dtype="float64"), "gloo", quiet_s=300).results
    assert mistakes(chosen, mesh, ranks) == []
