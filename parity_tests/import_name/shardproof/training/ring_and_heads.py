"""The ranks of cp as a ring of groups that exchange heads, for attention by usp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def ring_and_heads(mesh: Any) -> DeviceMesh:
    """A mesh (ring, heads) over this rank's group of cp, in its order; heads is the smallest factor of cp above 1.

    Cost: makes groups, so all ranks of the mesh call it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    axes: dict[str, int] = {}
    for axis in mesh.axes:
        heads = smallest_factor(mesh.size(axis))
        axes |= {"ring": mesh.size(axis) // heads, "heads": heads} if axis == "cp" else {axis: mesh.size(axis)}
    full_mesh = init_device_mesh(mesh.device_mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return full_mesh["ring", "heads"]


def smallest_factor(size: int) -> int:
    """Above 1, of a size above 1."""
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)
