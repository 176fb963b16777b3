"""Which axis plays which part, in both generations of names."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer.mesh_axes import mesh_axes


def on_ranks(body, mesh, engine="lockstep"):
    return run(lambda view, case: body(view.device_mesh), CaseSpec(scheme="axes", mesh=mesh), engine).results


def names_and_ranks(mesh):
    return None if mesh is None else (mesh.mesh_dim_names, mesh.mesh.tolist())


def parts(mesh):
    axes = mesh_axes(mesh)
    return (
        names_and_ranks(axes.fsdp_mesh),
        names_and_ranks(axes.tp_mesh),
        names_and_ranks(axes.loss_mesh),
        axes.data_size,
        axes.shard_size,
    )


CASES = [
    # sizes; from rank 0: FSDP's mesh, tp, the loss's ranks, how many ranks of data, of shards
    ({"dp_shard": 2}, ((("dp_shard",), [0, 1]), None, (("dp_shard",), [0, 1]), 2, 2)),
    ({"data_parallel": 2}, ((("data_parallel",), [0, 1]), None, (("data_parallel",), [0, 1]), 2, 2)),
    (
        {"dp_shard": 2, "cp": 2, "tp": 2},
        ((("dp_shard_cp",), [0, 2, 4, 6]), (("tp",), [0, 1]), (("dp_cp",), [0, 2, 4, 6]), 4, 4),
    ),
    (
        {"data_parallel": 2, "context_parallel": 2, "tensor_parallel": 1},
        ((("dp_cp",), [0, 1, 2, 3]), (("tensor_parallel",), [0]), (("dp_cp",), [0, 1, 2, 3]), 4, 4),
    ),
    (
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        ((("dp_replicate", "dp_shard"), [[0, 2], [4, 6]]), (("tp",), [0, 1]), (("dp_cp",), [0, 2, 4, 6]), 4, 2),
    ),
    (
        {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
        ((("dp_replicate", "dp_shard_cp"), [[0, 1], [2, 3]]), None, (("dp_cp",), [0, 1, 2, 3]), 4, 2),
    ),
    ({"dp_replicate": 1, "dp_shard": 2, "cp": 1}, ((("dp_shard",), [0, 1]), None, (("dp_cp",), [0, 1]), 2, 2)),
    ({"pp": 2, "cp": 2}, ((("cp",), [0, 1]), None, (("cp",), [0, 1]), 2, 2)),
    ({"dp_shard_cp": 2, "tp": 2}, ((("dp_shard_cp",), [0, 2]), (("tp",), [0, 1]), (("dp_shard_cp",), [0, 2]), 2, 2)),
    ({"dp_cp": 2, "tp": 1}, ((("dp_cp",), [0, 1]), (("tp",), [0]), (("dp_cp",), [0, 1]), 2, 2)),
    ({"cp": 2, "dp_shard": 2}, ((("dp_shard_cp",), [0, 1, 2, 3]), None, (("dp_cp",), [0, 1, 2, 3]), 4, 4)),
    (
        {"dp_replicate": 2, "tp": 2},
        ((("dp_replicate", "dp_shard_cp"), [[0], [2]]), (("tp",), [0, 1]), (("dp_replicate",), [0, 2]), 2, 1),
    ),
    ({"tp": 2}, ((("dp_shard_cp",), [0]), (("tp",), [0, 1]), (("dp_shard_cp",), [0]), 1, 1)),
    ({"ep": 2}, ((("ep",), [0, 1]), None, (("ep",), [0, 1]), 2, 2)),
    ({"dp_shard": 2, "ep": 1}, ((("dp_shard",), [0, 1]), None, (("dp_shard",), [0, 1]), 2, 2)),
    (
        {"dp_shard": 2, "ep": 2, "tp": 2},
        ((("dp_shard_cp_ep",), [0, 2, 4, 6]), (("tp",), [0, 1]), (("dp_cp_ep",), [0, 2, 4, 6]), 4, 4),
    ),
    (
        {"dp_replicate": 2, "ep": 2},
        ((("dp_replicate", "ep"), [[0, 1], [2, 3]]), None, (("dp_cp_ep",), [0, 1, 2, 3]), 4, 2),
    ),
    ({"dp_cp": 2, "ep": 2}, ((("dp_shard_cp_ep",), [0, 1, 2, 3]), None, (("dp_cp_ep",), [0, 1, 2, 3]), 4, 4)),
]


@pytest.mark.parametrize(("mesh", "want"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_parts(mesh, want):
    assert on_ranks(parts, mesh)[0] == want


OF_EXPERTS = [
    # sizes; from rank 0: the mesh that experts are sharded over, and FSDP's mesh of the ranks with the same experts
    ({"ep": 2}, ((("ep",), [0, 1]), (("dp_shard_cp",), [0]))),
    ({"dp_shard": 2, "ep": 2, "tp": 2}, ((("ep", "tp"), [[0, 1], [2, 3]]), (("dp_shard",), [0, 4]))),
    ({"tp": 2, "ep": 2}, ((("tp", "ep"), [[0, 1], [2, 3]]), (("dp_shard_cp",), [0]))),
    (
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        ((("ep",), [0, 1]), (("dp_replicate", "dp_shard"), [[0, 2], [4, 6]])),
    ),
    ({"dp_shard": 2, "ep": 1}, ((("ep",), [0]), (("dp_shard",), [0, 1]))),
    ({"dp_shard": 2}, (None, (("dp_shard",), [0, 1]))),
]


@pytest.mark.parametrize(("mesh", "want"), OF_EXPERTS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_parts_of_experts(mesh, want):
    def body(device_mesh):
        axes = mesh_axes(device_mesh)
        return names_and_ranks(axes.expert_mesh), names_and_ranks(axes.edp_mesh)

    assert on_ranks(body, mesh)[0] == want


def test_ranks_of_ep_shard_are_rejected():
    def body(mesh):
        with pytest.raises(
            ValueError, match="axis 'ep_shard' has 2 ranks, over which nothing would be summed; name it"
        ):
            mesh_axes(mesh)
        return True

    assert on_ranks(body, {"ep_shard": 2, "ep": 1}) == (True, True)


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_whoever_flattened_first_is_used_again(engine):
    def body(mesh):
        flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        axes = mesh_axes(mesh)
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=axes.shard_mesh.get_group())
        return axes.shard_mesh is flat, axes.shard_mesh is axes.shard_mesh, total.item()

    assert on_ranks(body, {"dp_shard": 1, "cp": 2}, engine) == ((True, True, 2.0),) * 2


def test_a_flattened_name_of_other_axes():
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
def test_axes_that_mean_nothing_certain(names, message):
    def body(mesh):
        device_mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        with pytest.raises(ValueError) as error:
            mesh_axes(device_mesh)
        return str(error.value)

    results = run(lambda view, case: body(view.device_mesh), CaseSpec(scheme="axes", mesh={"x": 2}))
    assert all(each.startswith("device_mesh: ") and message in each for each in results.results)
    assert results.ledger.rows == []


def test_a_torch_without_the_needed_functions(monkeypatch):
    """The attribute and the version are named, and nothing else is tried."""

    def body(mesh):
        with pytest.raises(RuntimeError) as error:
            _ = mesh_axes(mesh).shard_mesh
        return str(error.value)

    monkeypatch.delattr(DeviceMesh, "_flatten")
    message = f"parallelizer: torch {torch.__version__} has no DeviceMesh._flatten, which is needed here"
    assert all(each.startswith(message) for each in on_ranks(body, {"dp_shard": 1, "cp": 2, "pp": 1}))
