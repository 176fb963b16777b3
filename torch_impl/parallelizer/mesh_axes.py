"""Which axis of a device mesh plays which part. Two generations of names are known.

    part        older               newer
    replicate                       dp_replicate
    data        data_parallel       dp_shard
    cp          context_parallel    cp
    tp          tensor_parallel     tp

Parameters are sharded over data x cp, called dp_cp by the older names and dp_shard_cp by the newer; where nobody made
that axis and cp has more than one rank, it is made here. A mesh may have it as an axis of its own in place of the two.
The loss is normalised over dp_cp: replicate x data x cp. A missing axis has size 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from torch_impl.parallelizer._torch_compat import flattened, has_flattened, joined, one_rank, root_of

OLDER = {"data": "data_parallel", "cp": "context_parallel", "tp": "tensor_parallel", "shard": "dp_cp"}
NEWER = {"replicate": "dp_replicate", "data": "dp_shard", "cp": "cp", "tp": "tp", "shard": "dp_shard_cp"}
BOTH = ("pp", "ep", "ep_shard", "dp_cp")
KNOWN = tuple(dict.fromkeys([*OLDER.values(), *NEWER.values(), *BOTH]))


@dataclass(frozen=True)
class MeshAxes:
    """The axes of one mesh by their part; None where it has none."""

    mesh: DeviceMesh
    replicate: str | None
    data: str | None
    cp: str | None
    tp: str | None
    shard: str | None  # data x cp as one axis of the mesh itself
    shard_name: str  # what that axis is called where it is flattened

    def size(self, *names: str | None) -> int:
        """Product of the sizes of axes; a missing one counts 1."""
        axes = self.mesh.mesh_dim_names or ()
        return math.prod(self.mesh.size(axes.index(name)) for name in names if name is not None)

    @property
    def data_size(self) -> int:
        """Ranks whose tokens differ, over which FSDP averages gradients."""
        return self.size(self.replicate, self.shard, self.data, self.cp)

    @property
    def shard_size(self) -> int:
        return self.size(self.shard, self.data, self.cp)

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return None if self.tp is None else self.mesh[self.tp]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh that parameters are sharded over."""
        if self.shard is not None:
            return self.mesh[self.shard]
        parts = [name for name in (self.data, self.cp) if name is not None]
        if not parts:
            return one_rank(self.mesh, self.shard_name)
        if len(parts) == 2 and (self.size(self.cp) > 1 or has_flattened(self.mesh, self.shard_name)):
            return _flattened(self.mesh, parts, self.shard_name)
        return self.mesh[parts[0]]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What FSDP is given: the shard mesh, or with replicas (replicate, shard)."""
        if self.size(self.replicate) == 1 or self.replicate is None:
            return self.shard_mesh
        return joined([self.mesh[self.replicate], self.shard_mesh])

    @property
    def loss_mesh(self) -> DeviceMesh:
        """The 1-D mesh of all ranks whose tokens differ."""
        parts = [name for name in (self.replicate, self.shard, self.data, self.cp) if name is not None]
        if not parts:
            return self.shard_mesh
        return self.mesh[parts[0]] if len(parts) == 1 else _flattened(self.mesh, parts, "dp_cp")


def mesh_axes(device_mesh: DeviceMesh) -> MeshAxes:
    """The parts that a mesh's axes play. Nothing is sent.

    Errors: TypeError unless a DeviceMesh; ValueError for axes without names, with unknown names or of both
            generations, and for a flattened axis beside what it is made of.
    """
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh: is a {type(device_mesh).__name__}; pass a torch DeviceMesh")
    if not device_mesh.mesh_dim_names:
        raise ValueError(f"device_mesh: its {device_mesh.ndim} axes have no names; name them ({', '.join(KNOWN)})")
    parts, shard_name = parts_of(device_mesh.mesh_dim_names)
    return MeshAxes(device_mesh, **parts, shard_name=shard_name)


def parts_of(seen: tuple[str, ...]) -> tuple[dict[str, str | None], str]:
    """Axis of each part by the names seen, and what the axis of all shards is called. Errors: see `mesh_axes`."""
    unknown = [name for name in seen if name not in KNOWN]
    if unknown:
        raise ValueError(f"device_mesh: axis {unknown[0]!r} of {seen} is not known; known are {', '.join(KNOWN)}")
    older, newer = _only(OLDER, NEWER, seen), _only(NEWER, OLDER, seen)
    if older and newer:
        raise ValueError(
            f"device_mesh: axes {seen} mix older names {older} and newer names {newer}; "
            f"use {', '.join(OLDER.values())} or {', '.join(NEWER.values())}"
        )
    names = OLDER if older else NEWER
    found = {part: name if name in seen else None for part, name in names.items()}
    whole = "dp_cp" if "dp_cp" in seen else found["shard"]
    parts = [found[part] for part in ("shard", "data", "cp") if found[part] not in (None, whole)]
    if whole is not None and parts:
        raise ValueError(
            f"device_mesh: axis {whole!r} of {seen} stands beside {parts[0]!r}, which it contains; keep one of them"
        )
    found["shard"] = whole
    return {part: found.get(part) for part in ("replicate", "data", "cp", "tp", "shard")}, names["shard"]


def check_one_root(**meshes: DeviceMesh | None) -> None:
    """ValueError unless all meshes given were sliced from one root; None is no mesh."""
    roots = {name: root_of(mesh) for name, mesh in meshes.items() if mesh is not None}
    (first, root), *others = roots.items() or [("", None)]
    for name, other in others:
        if other is not root and other != root:
            raise ValueError(f"{name}: its root mesh is {other}, that of {first} is {root}; slice both from one mesh")


def _only(names: dict[str, str], others: dict[str, str], seen: tuple[str, ...]) -> list[str]:
    """Names seen that belong to one generation alone."""
    return [name for name in seen if name in names.values() and name not in (*others.values(), *BOTH)]


def _flattened(mesh: DeviceMesh, parts: list[str], name: str) -> DeviceMesh:
    parts = [axis for axis in mesh.mesh_dim_names or () if axis in parts]  # torch slices in the mesh's own order
    try:
        return flattened(mesh[tuple(parts)], name)
    except ValueError as error:
        raise ValueError(
            f"device_mesh: axis {name!r} was made of other axes than {parts}; flatten these under this name"
        ) from error
