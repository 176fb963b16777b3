"""The mesh as one rank sees it: the first argument of a function that runs on every rank.

`MeshView` is a thin wrapper around torch's DeviceMesh, plus the global positions of this rank's shard of each dim.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Layout = Callable[[int, int], Sequence[Tensor]]


class MeshView:
    """A named mesh as one rank sees it; `mesh["tp"]` is the process group of an axis.

    `device_mesh` is torch's DeviceMesh. `shardings` maps a sharded dim to its global size and its shardings, outermost
    first. A sharding is a mesh axis and a layout, `(size, world) -> positions of each rank`.

    Cost:   no collective.
    Errors: ValueError for an axis that is not in the mesh, from each method that takes one.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        shardings: Mapping[str, tuple[int, Sequence[tuple[str, Layout]]]] | None = None,
    ) -> None:
        self.device_mesh = device_mesh
        self._shardings = dict(shardings or {})

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, in the mesh's order."""
        return self.device_mesh.mesh_dim_names or ()

    def __getitem__(self, axis: str) -> ProcessGroup:
        self._check(axis)
        return self.device_mesh.get_group(axis)

    if not TYPE_CHECKING:  # with this method, a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            hint = "mesh.device_mesh is torch's DeviceMesh, mesh[axis] a process group"
            raise AttributeError(f"mesh: has no {name!r}; {hint}")

    def size(self, axis: str) -> int:
        """Number of ranks along an axis. Errors: ValueError for an axis that is not in the mesh."""
        # torch takes a mesh dim by number here, and by name in the other two methods.
        self._check(axis)
        return self.device_mesh.size(self.axes.index(axis))

    def rank(self, axis: str) -> int:
        """This rank's index along an axis. Errors: ValueError for an axis that is not in the mesh."""
        self._check(axis)
        return self.device_mesh.get_local_rank(axis)

    def bind(self, shardings: Mapping[str, tuple[int, Sequence[tuple[str, Layout]]]]) -> MeshView:
        """The same mesh with other sharded dims; `shardings` as for the class."""
        return MeshView(self.device_mesh, shardings)

    def total(self, dim: str) -> int:
        """Full size of a sharded dim, over all ranks.

        Errors: ValueError for a dim without a sharding here.
        """
        return self._sharding(dim)[0]

    def global_ids(self, dim: str) -> Tensor:
        """Global positions of this rank's shard of `dim`, in local order, as int64.

        Errors: ValueError for a dim without a sharding here.
        """
        size, shardings = self._sharding(dim)
        device = self.device_mesh.device_type
        # Outermost sharding first: each further sharding divides the positions that this rank still has.
        ids = torch.arange(size, device=device)
        for axis, layout in shardings:
            ids = ids[torch.as_tensor(layout(len(ids), self.size(axis))[self.rank(axis)], device=device)]
        return ids

    def _sharding(self, dim: str) -> tuple[int, Sequence[tuple[str, Layout]]]:
        if dim not in self._shardings:
            raise ValueError(f"mesh: dim {dim!r} is not known here ({', '.join(self._shardings) or 'none is'})")
        return self._shardings[dim]

    def _check(self, axis: str) -> None:
        if axis not in self.axes:
            near = difflib.get_close_matches(str(axis), self.axes, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"mesh: axis {axis!r} is not in mesh ({', '.join(self.axes)}){hint}")
