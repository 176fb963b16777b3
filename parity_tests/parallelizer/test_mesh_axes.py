"""Meshes with flattened axes, and rejected names of axes; `test_axes_of_ranks` tests the parts of a mesh."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer.mesh_axes import mesh_axes


def on_ranks(body, mesh, engine="lockstep"):
    return run(lambda view, case: body(view.device_mesh), CaseSpec(scheme="axes", mesh=mesh), engine).results


def test_ranks_of_ep_shard_are_rejected():
    def body(mesh):
        with pytest.raises(
            ValueError, match="axis 'ep_shard' has 2 ranks, but nothing would be summed over this axis; name it"
        ):
            mesh_axes(mesh)
        return True

    assert on_ranks(body, {"ep_shard": 2, "ep": 1}) == (True, True)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_an_existing_flattened_mesh_is_used(engine):
    def body(mesh):
        flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        axes = mesh_axes(mesh)
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=axes.shard_mesh.get_group())
        return axes.shard_mesh is flat, axes.shard_mesh is axes.shard_mesh, total.item()

    assert on_ranks(body, {"dp_shard": 1, "cp": 2}, engine) == ((True, True, 2.0),) * 2


def test_a_flattened_mesh_of_other_axes_is_rejected():
    def body(mesh):
        second_mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
        second_mesh["cp", "tp"]._flatten("dp_shard_cp")
        with pytest.raises(ValueError) as error:
            _ = mesh_axes(second_mesh).shard_mesh
        return str(error.value)

    message = "axis 'dp_shard_cp' was flattened from other axes than ['dp_shard', 'cp']; flatten these under this name"
    assert all(message in each for each in on_ranks(body, {"x": 4}))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dp_shard", "tensor_parallel"), "mix older names ['tensor_parallel'] and newer names ['dp_shard']"),
        (("tp", "tensor_parallel"), "mix older names ['tensor_parallel'] and newer names ['tp']"),
        (("dp", "tp"), "axis 'dp' of ('dp', 'tp') is not known; use one of data_parallel, "),
        (("dp_shard_cp", "cp"), "axis 'dp_shard_cp' of ('dp_shard_cp', 'cp') is next to 'cp', which it contains"),
        (("data_parallel", "dp_cp"), "axis 'dp_cp' of ('data_parallel', 'dp_cp') is next to 'data_parallel'"),
        (("dp_shard_cp", "dp_cp"), "axis 'dp_cp' of ('dp_shard_cp', 'dp_cp') is next to 'dp_shard_cp', which it"),
        (None, "its 2 axes have no names; name them (data_parallel, "),
    ],
)
def test_ambiguous_axes_are_rejected(names, message):
    def body(mesh):
        device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        with pytest.raises(ValueError) as error:
            mesh_axes(device_mesh)
        return str(error.value)

    results = run(lambda view, case: body(view.device_mesh), CaseSpec(scheme="axes", mesh={"x": 2}))
    assert all(each.startswith("device_mesh: ") and message in each for each in results.results)
    assert results.ledger.rows == []


def test_a_torch_without_the_needed_functions_is_rejected(monkeypatch):
    """The error names the attribute and the version of torch."""

    def body(mesh):
        with pytest.raises(RuntimeError) as error:
            _ = mesh_axes(mesh).shard_mesh
        return str(error.value)

    monkeypatch.delattr(DeviceMesh, "_flatten")
    message = f"parallelizer: torch {torch.__version__} has no DeviceMesh._flatten, which is needed here"
    assert all(each.startswith(message) for each in on_ranks(body, {"dp_shard": 1, "cp": 2, "pp": 1}))
