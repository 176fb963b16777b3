"""mesh_axes: which ranks each rank shares parameters, tokens and experts with, from its coordinates."""

from itertools import product
from math import prod

import pytest
from torch.distributed.device_mesh import DeviceMesh

from shardproof import CaseSpec
from shardproof.engines.engines import run
from torch_impl.parallelizer.mesh_axes import mesh_axes

WORLD = 8
ONE = ("dp_shard_cp", ())  # an axis of one rank, where the mesh has none for data
# The sizes of the mesh's axes, the caller's own names, and the mesh of each of ROLES: one axis, a list of two, or None.
# An axis is a name, or a pair of a new name and the axes that it joins.
MESHES = (
    ({"pp": 1, "dp_shard": 8}, {}, "dp_shard", None, "dp_shard", None, "dp_shard"),
    ({"tp": 8}, {}, ONE, "tp", ONE, None, ONE),
    ({"pp": 2, "tp": 4}, {}, ONE, "tp", ONE, None, ONE),
    (
        {"dp_shard": 2, "cp": 2, "tp": 2},
        {},
        ("dp_shard_cp", ("dp_shard", "cp")),
        "tp",
        ("dp_cp", ("dp_shard", "cp")),
        None,
        ("dp_shard_cp", ("dp_shard", "cp")),
    ),
    (
        {"tensor_parallel": 2, "context_parallel": 2, "data_parallel": 2},
        {},
        ("dp_cp", ("context_parallel", "data_parallel")),
        "tensor_parallel",
        ("dp_cp", ("context_parallel", "data_parallel")),
        None,
        ("dp_cp", ("context_parallel", "data_parallel")),
    ),
    (
        {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2},
        {},
        ["dp_replicate", "dp_shard"],
        "tp",
        ("dp_cp", ("dp_replicate", "dp_shard", "cp")),
        None,
        ["dp_replicate", "dp_shard"],
    ),
    (
        {"dp_replicate": 4, "tp": 2},
        {},
        ["dp_replicate", ONE],
        "tp",
        "dp_replicate",
        None,
        ["dp_replicate", ONE],
    ),
    (
        {"dp_replicate": 1, "dp_shard": 2, "ep": 2, "tp": 2},
        {},
        ("dp_shard_cp_ep", ("dp_shard", "ep")),
        "tp",
        ("dp_cp_ep", ("dp_replicate", "dp_shard", "ep")),
        ["ep", "tp"],
        "dp_shard",
    ),
    (
        {"dp_replicate": 2, "tp": 2, "ep": 2},
        {},
        ["dp_replicate", "ep"],
        "tp",
        ("dp_cp_ep", ("dp_replicate", "ep")),
        ["tp", "ep"],
        ["dp_replicate", ONE],
    ),
    ({"dp_shard_cp": 4, "ep": 1, "pp": 2}, {}, "dp_shard_cp", None, "dp_shard_cp", "ep", "dp_shard_cp"),
    (
        {"dp_cp": 2, "ep": 4},
        {},
        ("dp_shard_cp_ep", ("dp_cp", "ep")),
        None,
        ("dp_cp_ep", ("dp_cp", "ep")),
        "ep",
        "dp_cp",
    ),
    (
        {"copies": 2, "shards": 2, "tensor": 2},
        {"replicate": "copies", "shard": "shards", "tp": "tensor"},
        ["copies", "shards"],
        "tensor",
        ("dp_cp", ("copies", "shards")),
        None,
        ["copies", "shards"],
    ),
    ({"tensor": 8}, {"tp": "tensor", "shard": None}, ONE, "tensor", ONE, None, ONE),
    (
        {"dp_shard": 4, "cp": 2},
        {"shard": "dp_shard_cp"},
        ("dp_shard_cp", ("dp_shard", "cp")),
        None,
        ("dp_cp", ("dp_shard", "cp")),
        None,
        ("dp_shard_cp", ("dp_shard", "cp")),
    ),
    ({"cp": 8}, {"shard": "dp_shard_cp"}, "cp", None, "cp", None, "cp"),
    ({"data_parallel": 8}, {}, "data_parallel", None, "data_parallel", None, "data_parallel"),
    ({"pp": 2, "cp": 4}, {}, "cp", None, "cp", None, "cp"),
    ({"ep": 8}, {}, "ep", None, "ep", "ep", ONE),
    ({"tp": 2, "ep": 4}, {}, "ep", "tp", "ep", ["tp", "ep"], ONE),
    (
        {"cp": 2, "dp_shard": 4},
        {},
        ("dp_shard_cp", ("dp_shard", "cp")),
        None,
        ("dp_cp", ("dp_shard", "cp")),
        None,
        ("dp_shard_cp", ("dp_shard", "cp")),
    ),
    (
        {"dp_replicate": 1, "dp_shard": 8, "cp": 1},
        {},
        "dp_shard",
        None,
        ("dp_cp", ("dp_replicate", "dp_shard", "cp")),
        None,
        "dp_shard",
    ),
    (
        {"dp_replicate": 2, "dp_shard": 1, "cp": 4},
        {},
        ["dp_replicate", ("dp_shard_cp", ("dp_shard", "cp"))],
        None,
        ("dp_cp", ("dp_replicate", "dp_shard", "cp")),
        None,
        ["dp_replicate", ("dp_shard_cp", ("dp_shard", "cp"))],
    ),
    (
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {},
        ["dp_replicate", ("dp_shard_cp_ep", ("dp_shard", "ep"))],
        None,
        ("dp_cp_ep", ("dp_replicate", "dp_shard", "ep")),
        "ep",
        ["dp_replicate", "dp_shard"],
    ),
)
ROLES = ("fsdp_mesh", "tp_mesh", "loss_mesh", "expert_mesh", "edp_mesh")
# A name that is no axis, two names of one role, names of both generations, an axis beside another that contains it.
REJECTED = (
    ({"dp_shard": 4, "tp": 2}, {"tp": "tensr"}),
    ({"dp_shard": 4, "tp": 2}, {"replicate": "copies"}),
    ({"dp_shard": 4, "cp": 2}, {"shard": "shards"}),
    ({"dp_shard": 4, "tp": 2}, {"tp": "dp_shard_cp"}),
    ({"tp": 8}, {"shard": "dp_shard_cp"}),
    ({"tp": 4, "tensor": 2}, {"tp": "tensor"}),
    ({"tp": 4, "tensor": 2}, {}),
    ({"dp_shard": 4, "tensor_parallel": 2}, {}),
    ({"dp_shard_cp": 4, "cp": 2}, {}),
    ({"dp_cp": 4, "dp_shard": 2}, {}),
    ({"ep_shard": 2, "ep": 4}, {}),
)


def ranks_over(sizes, axes, rank):
    """The ranks that share a rank's other coordinates, in the order of the mesh, nested by axis."""
    strides = {axis: prod(list(sizes.values())[at + 1 :]) for at, axis in enumerate(sizes)}
    coordinates = {axis: rank // strides[axis] % sizes[axis] for axis in sizes}
    base = sum(strides[axis] * at for axis, at in coordinates.items() if axis not in axes)
    ordered = [axis for axis in sizes if axis in axes]
    steps = product(*(range(sizes[axis]) for axis in ordered))
    return [base + sum(strides[axis] * at for axis, at in zip(ordered, step, strict=True)) for step in steps]


def expected_mesh(sizes, axes, rank):
    """The names and ranks of a mesh over `axes`, written as in MESHES."""
    if axes is None:
        return None
    pairs = [
        (axis, (axis,)) if isinstance(axis, str) else axis for axis in (axes if isinstance(axes, list) else [axes])
    ]
    ranks = ranks_over(sizes, sum((contained for _, contained in pairs), ()), rank)
    if len(pairs) == 2:
        inner = prod(sizes[axis] for axis in pairs[1][1])
        ranks = [ranks[start : start + inner] for start in range(0, len(ranks), inner)]
    return tuple(name for name, _ in pairs), ranks


def expected_axes(case, rank):
    """The mesh of each role, the numbers of ranks with other data and other shards, and whether there are stages."""
    sizes, _, *roles = case
    fsdp, loss = (role if isinstance(role, list) else [role] for role in (roles[0], roles[2]))
    shards, data = (
        prod(len(ranks_over(sizes, (each,) if isinstance(each, str) else each[1], rank)) for each in axes)
        for axes in (fsdp[-1:], loss)
    )
    meshes = {name: expected_mesh(sizes, axes, rank) for name, axes in zip(ROLES, roles, strict=True)}
    return {**meshes, "data_size": data, "shard_size": shards, "has_stages": sizes.get("pp", 1) > 1}


def mesh_and_ranks(mesh, sizes):
    """A mesh of `sizes` over the ranks of axis x, and these ranks. It is a slice of a mesh that all ranks make."""
    outer, ranks = {axis: mesh.size(axis) for axis in mesh.axes if axis != "x"}, mesh.device_mesh.mesh
    every = DeviceMesh("cpu", ranks.view(*outer.values(), *sizes.values()), mesh_dim_names=(*outer, *sizes))
    return every[tuple(sizes)], mesh.device_mesh["x"].mesh.tolist()


def positions(ranks, world):
    return [positions(each, world) for each in ranks] if isinstance(ranks, list) else world.index(ranks)


def on_ranks(body, inside):
    """The results of `body` on all ranks of a mesh; with `inside`, of two such meshes in a larger world."""
    return run(body, CaseSpec(scheme="axes", mesh={"outer": 2, "x": WORLD} if inside else {"x": WORLD})).results


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a larger world"])
@pytest.mark.parametrize("case", MESHES, ids=lambda case: "-".join(case[0]))
def test_axes_of_ranks(case, inside):
    sizes, own_names, *_ = case

    def body(mesh, _):
        device_mesh, world = mesh_and_ranks(mesh, sizes)
        axes = mesh_axes(device_mesh, own_names)
        parts = {name: getattr(axes, name) for name in ROLES}
        meshes = {
            name: None if part is None else (part.mesh_dim_names, positions(part.mesh.tolist(), world))
            for name, part in parts.items()
        }
        rest = {name: getattr(axes, name) for name in ("data_size", "shard_size", "has_stages")}
        return mesh.rank("x"), {**meshes, **rest}

    for rank, seen in on_ranks(body, inside):
        assert seen == expected_axes(case, rank), f"rank {rank}"


@pytest.mark.parametrize(("sizes", "own_names"), REJECTED, ids=str)
def test_names_that_are_no_axes_are_rejected_on_every_rank(sizes, own_names):
    def body(mesh, case):
        with pytest.raises(ValueError):
            mesh_axes(mesh_and_ranks(mesh, sizes)[0], own_names)
        return True

    assert on_ranks(body, inside=False) == (True,) * WORLD
