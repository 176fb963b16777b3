"""The mesh of usp attention: the ranks of cp as a ring of groups that exchange heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def ring_and_heads(mesh: Any) -> DeviceMesh:
    """A mesh (ring, heads) over the ranks of cp, in their order; heads is the smallest factor of cp above 1.

    Cost: creates process groups, so all ranks of the mesh must call it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    axes: dict[str, int] = {}
    for axis in mesh.axes:
        heads = smallest_factor(mesh.size(axis))
        axes |= {"ring": mesh.size(axis) // heads, "heads": heads} if axis == "cp" else {axis: mesh.size(axis)}
    full_mesh = init_device_mesh(mesh.device_mesh.device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return full_mesh["ring", "heads"]


def smallest_factor(size: int) -> int:
    """The smallest factor above 1; 1 for a size of 1."""
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)
