"""Find the role of each axis of a device mesh by its name. Two generations of names are accepted.

    role        older               newer
    replicate                       dp_replicate
    data        data_parallel       dp_shard
    cp          context_parallel    cp
    tp          tensor_parallel     tp
    ep          ep                  ep

Parameters are sharded over data x cp. This axis is called dp_cp with the older names and dp_shard_cp with the newer; it
is created here if the mesh lacks it and cp has more than one rank, and a mesh may have it in place of the two axes.
The loss is normalised over dp_cp: replicate x data x cp. A missing axis has size 1.

Ranks of ep have different tokens, like ranks of data and cp: outside the experts ep is one more axis of data, and the
two axes become dp_shard_cp_ep and dp_cp_ep. Experts are first divided over ep and then sharded over data x cp only.
data x cp and the replicas together are edp, the ranks that have the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from torch_impl.parallelizer._torch_compat import axis_of_one_rank, concatenate, flatten, has_flattened

OLDER = {"data": "data_parallel", "cp": "context_parallel", "tp": "tensor_parallel", "shard": "dp_cp"}
NEWER = {"replicate": "dp_replicate", "data": "dp_shard", "cp": "cp", "tp": "tp", "shard": "dp_shard_cp"}
IN_BOTH = ("pp", "ep", "ep_shard", "dp_cp")
# The argument that takes a mesh's own name for the axis of a role.
ARGUMENTS = {"replicate": "dp_replicate_mesh_name", "shard": "dp_shard_cp_mesh_name", "tp": "tp_mesh_name"}
AXIS_NAMES = tuple(dict.fromkeys([*OLDER.values(), *NEWER.values(), *IN_BOTH]))


@dataclass(frozen=True)
class MeshAxes:
    """The name of the axis for each role, or None if the mesh has no such axis."""

    mesh: DeviceMesh
    replicate: str | None
    data: str | None
    cp: str | None
    tp: str | None
    ep: str | None
    shard: str | None  # data x cp as one axis of the mesh
    shard_name: str  # the name of that axis if it is flattened

    def size(self, *names: str | None) -> int:
        """The product of the sizes of axes; a missing axis counts as 1."""
        axes = self.mesh.mesh_dim_names or ()
        return math.prod(self.mesh.size(axes.index(name)) for name in names if name is not None)

    @property
    def has_stages(self) -> bool:
        """Whether each rank has only a pipeline stage of the model."""
        return "pp" in (self.mesh.mesh_dim_names or ()) and self.size("pp") > 1

    @property
    def data_size(self) -> int:
        """The number of ranks with different tokens, over which FSDP averages gradients."""
        return self.size(self.replicate, self.shard, self.data, self.cp, self.ep)

    @property
    def shard_size(self) -> int:
        """The number of ranks that a parameter outside the experts is sharded over."""
        return self.size(self.shard, self.data, self.cp, self.ep)

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        return None if self.tp is None else self.mesh[self.tp]

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The mesh of the experts' stacks before FSDP: ep, or ep and tp in the mesh's order."""
        if self.ep is None:
            return None
        return self.mesh[tuple(name for name in self.mesh.mesh_dim_names or () if name in (self.ep, self.tp))]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh that parameters outside the experts are sharded over."""
        if self.size(self.ep) == 1:
            return self.edp_shard_mesh
        names = [name for name in (self.shard, self.data, self.cp, self.ep) if name is not None]
        return self.mesh[names[0]] if len(names) == 1 else _flattened_axis(self.mesh, names, f"{self.shard_name}_ep")

    @property
    def edp_shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh that an ep rank's experts are sharded over."""
        if self.shard is not None:
            return self.mesh[self.shard]
        names = [name for name in (self.data, self.cp) if name is not None]
        if not names:
            return axis_of_one_rank(self.mesh, self.shard_name)
        # Ranks of cp have different tokens of the same sequences, so their gradients belong to the same mean.
        if len(names) == 2 and (self.size(self.cp) > 1 or has_flattened(self.mesh, self.shard_name)):
            return _flattened_axis(self.mesh, names, self.shard_name)
        return self.mesh[names[0]]

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for FSDP: the shard mesh, or (replicate, shard) with replicas."""
        return self._with_replicas(self.shard_mesh)

    @property
    def edp_mesh(self) -> DeviceMesh:
        """The FSDP mesh for experts: all ranks that have the same experts."""
        return self._with_replicas(self.edp_shard_mesh)

    def _with_replicas(self, shard_mesh: DeviceMesh) -> DeviceMesh:
        if self.size(self.replicate) == 1 or self.replicate is None:
            return shard_mesh
        # Given two axes, `fully_shard` replicates parameters over the first and shards them over the second.
        return concatenate([self.mesh[self.replicate], shard_mesh])

    @property
    def loss_mesh(self) -> DeviceMesh:
        """The 1-D mesh of all ranks with different tokens."""
        ep = self.ep if self.size(self.ep) > 1 else None
        names = [name for name in (self.replicate, self.shard, self.data, self.cp, ep) if name is not None]
        if not names:
            return self.shard_mesh
        flat_name = "dp_cp" if ep is None else "dp_cp_ep"
        return self.mesh[names[0]] if len(names) == 1 else _flattened_axis(self.mesh, names, flat_name)


def mesh_axes(device_mesh: DeviceMesh, own_names: Mapping[str, str | None] | None = None) -> MeshAxes:
    """Find the roles of a mesh's axes by their names. Nothing is sent.

    `own_names` are a mesh's own names for the roles replicate, shard and tp, in place of the names in the tables. The
    name for shard may belong to flattened axes. A role that is missing or None has size 1 if no axis has it.

    Errors: ValueError for axes without names, with unknown names or of both generations, a flattened axis next to an
            axis that it contains, an own name that is not an axis, and an ep_shard axis of several ranks, which belongs
            to another mesh.
    """
    if not device_mesh.mesh_dim_names:
        names = ", ".join(AXIS_NAMES)
        raise ValueError(f"device_mesh: its {device_mesh.ndim} axes have no names; name them ({names})")
    renamed = {name: NEWER[role] for role, name in (own_names or {}).items() if name is not None}
    names = tuple(renamed.get(name, name) for name in device_mesh.mesh_dim_names)
    if len(set(names)) < len(names):
        own = ", ".join(map(repr, renamed))
        raise ValueError(f"device_mesh: axes {device_mesh.mesh_dim_names} have one role twice, with {own}; rename one")
    roles, shard_name = roles_of(names)
    _check_own_names(device_mesh, own_names or {}, roles, shard_name)
    actual = dict(zip(names, device_mesh.mesh_dim_names, strict=True))
    roles = {role: None if name is None else actual[name] for role, name in roles.items()}
    shard_name = (own_names or {}).get("shard") or shard_name
    sizes = dict(zip(device_mesh.mesh_dim_names, device_mesh.shape, strict=True))
    if sizes.get("ep_shard", 1) > 1:
        data_name = (NEWER if shard_name == NEWER["shard"] else OLDER)["data"]
        raise ValueError(
            f"device_mesh: axis 'ep_shard' has {sizes['ep_shard']} ranks, but nothing would be summed over this axis; "
            f"name it {data_name!r}, over which experts are sharded beside ep"
        )
    return MeshAxes(device_mesh, **roles, shard_name=shard_name)


def _check_own_names(
    mesh: DeviceMesh, own_names: Mapping[str, str | None], roles: Mapping[str, str | None], shard_name: str
) -> None:
    """ValueError for a name that is not an axis: its role would silently have size 1."""
    axes = mesh.mesh_dim_names or ()
    for role, name in own_names.items():
        if name is None or name in axes:
            continue
        # The flattened axis of data and cp exists under some name, or will be made under the tables' name.
        is_flattened = has_flattened(mesh, name) or (name == shard_name and (roles["data"] or roles["cp"]))
        if not (role == "shard" and is_flattened):
            argument = ARGUMENTS[role]
            raise ValueError(
                f"{argument}={name!r} is not an axis of device_mesh, which has {', '.join(map(repr, axes))}; pass one "
                f"of these names, or leave {argument} out if the mesh has no such axis"
            )


def roles_of(axes: tuple[str, ...]) -> tuple[dict[str, str | None], str]:
    """The axis of each role, and the name of the axis that parameters are sharded over. Errors: see `mesh_axes`."""
    # 1. Check that every name is in the tables, and that all are of one generation.
    unknown = [name for name in axes if name not in AXIS_NAMES]
    if unknown:
        names = ", ".join(AXIS_NAMES)
        raise ValueError(f"device_mesh: axis {unknown[0]!r} of {axes} is not known; use one of {names}")
    older, newer = _only_in(OLDER, NEWER, axes), _only_in(NEWER, OLDER, axes)
    if older and newer:
        raise ValueError(
            f"device_mesh: axes {axes} mix older names {older} and newer names {newer}; "
            f"use {', '.join(OLDER.values())} or {', '.join(NEWER.values())}"
        )
    # If all names are in both generations, such as pp, the newer names apply.
    generation = OLDER if older else NEWER
    roles = {role: name if name in axes else None for role, name in generation.items()}
    # 2. Check that a flattened axis stands in place of the axes that it contains, not next to them.
    shard = "dp_cp" if "dp_cp" in axes else roles["shard"]
    contained = [roles[role] for role in ("shard", "data", "cp") if roles[role] not in (None, shard)]
    if shard is not None and contained:
        raise ValueError(
            f"device_mesh: axis {shard!r} of {axes} is next to {contained[0]!r}, which it contains; keep one"
        )
    roles["shard"] = shard
    roles["ep"] = "ep" if "ep" in axes else None
    return {role: roles.get(role) for role in ("replicate", "data", "cp", "tp", "ep", "shard")}, generation["shard"]


def _only_in(generation: dict[str, str], other: dict[str, str], axes: tuple[str, ...]) -> list[str]:
    """The axes whose names belong to one generation only."""
    return [name for name in axes if name in generation.values() and name not in (*other.values(), *IN_BOTH)]


def _flattened_axis(mesh: DeviceMesh, names: list[str], flat_name: str) -> DeviceMesh:
    names = [axis for axis in mesh.mesh_dim_names or () if axis in names]  # torch slices in the order of the mesh
    try:
        return flatten(mesh[tuple(names)], flat_name)
    except ValueError as error:
        raise ValueError(
            f"device_mesh: axis {flat_name!r} was flattened from other axes than {names}; flatten these under this name"
        ) from error
