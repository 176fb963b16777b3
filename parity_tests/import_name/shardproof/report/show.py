"""`show(x)`: how a DTensor is sharded; sends no message, because its placements are known everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardproof.report.markup import Child, tag
from shardproof.report.notebook import strip
from shardproof.report.owner_map import MAX_COLUMNS, MAX_ROWS, owner_map
from shardproof.report.page_style import in_notebook
from shardproof.report.picture import FULL, Strip


@dataclass(frozen=True)
class Sharding:
    """Who holds which element: a line for each axis of the mesh, the strips of the dims, a map of the elements."""

    title: str
    lines: tuple[tuple[str, str | Strip], ...]
    ranks: np.ndarray  # the rank of each drawn element, as a matrix; for copies and addends, the first rank
    is_sampled: bool

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.lines), default=0)
        lines = [f"  {name:<{width}}  {content}" for name, content in self.lines]
        return "\n".join([self.title, *(lines or [f"  {FULL}"])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            tag("tr", tag("td", tag("code", name)), tag("td", content if isinstance(content, str) else _bars(content)))
            for name, content in self.lines
        ]
        caption = "rank that holds it" + (", of some of the elements" if self.is_sampled else "")
        picture: Child = owner_map(self.ranks, caption) if self.ranks.size else None
        return in_notebook(tag("p", tag("code", self.title)), tag("table", *rows), picture)


def show(tensor: Any) -> Sharding:
    """How a DTensor is sharded, drawn in a notebook and as text elsewhere: `show(model.weight)`.

    Ranks are the mesh's global ranks. Any rank can call this alone.

    Errors: TypeError if `tensor` is not a DTensor.
    """
    if not isinstance(tensor, DTensor):
        kind = f"a {type(tensor).__name__}"
        raise TypeError(f"show: tensor is {kind}, which has no record of other ranks; pass a DTensor")
    mesh = tensor.device_mesh
    sizes, names = tuple(mesh.shape), mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    coordinates = _coordinates(tensor, sizes)
    lines: list[tuple[str, str | Strip]] = []
    for axis, placement in enumerate(tensor.placements):
        if axis in coordinates:
            dim, owners = coordinates[axis]
            lines.append((f"{names[axis]}: {placement}", Strip(f"dim {dim} over {names[axis]}", owners)))
        else:
            lines.append((f"{names[axis]}: {placement}", _in_words(placement)))
    ranks, is_sampled = _ranks(tensor, coordinates, sizes)
    dtype = str(tensor.dtype).removeprefix("torch.")
    over = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    return Sharding(f"{dtype}{list(tensor.shape)} over {over}", tuple(lines), ranks, is_sampled)


def _coordinates(tensor: DTensor, sizes: Sequence[int]) -> dict[int, tuple[int, np.ndarray]]:
    """For each axis that shards a dim: the dim, and for each of its positions the coordinate that holds it."""
    pieces = {dim: [torch.arange(size)] for dim, size in enumerate(tensor.shape)}
    coordinates: dict[int, tuple[int, np.ndarray]] = {}
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_shard() and not hasattr(placement, "split_factor"):
            continue
        dim: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue]
        owners, parts = np.zeros(tensor.shape[dim], dtype=np.int64), []
        for piece in pieces[dim]:
            # The placement's own rule shards dim 0 of one-dimensional positions.
            shards = _like(placement)._split_tensor(piece, sizes[axis], with_padding=False, contiguous=False)[0]
            for coordinate, shard in enumerate(shards):
                owners[shard.numpy()] = coordinate
            parts += shards
        coordinates[axis], pieces[dim] = (dim, owners), parts
    return coordinates


def _like(placement: Any) -> Any:
    """The same kind of placement for dim 0."""
    strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(0, **strided)


def _ranks(
    tensor: DTensor, coordinates: Mapping[int, tuple[int, np.ndarray]], sizes: Sequence[int]
) -> tuple[np.ndarray, bool]:
    """The ranks of as many elements as fit into a map, as a matrix of the last dim by the others."""
    shape = tuple(tensor.shape) or (1,)
    if 0 in shape:
        return np.zeros((0, 0), dtype=np.int64), False
    down, across = int(np.prod(shape[:-1])), shape[-1]
    rows = np.arange(0, down, -(-down // MAX_ROWS))
    columns = np.arange(0, across, -(-across // MAX_COLUMNS))
    index = [*np.unravel_index(rows, shape[:-1]), columns] if shape[:-1] else [columns]
    at = []
    for axis in range(len(sizes)):
        owner_grid = np.zeros((len(rows), len(columns)), dtype=np.int64)
        if axis in coordinates:
            dim, owners = coordinates[axis]
            dim_owners = owners[index[dim]]
            owner_grid += dim_owners[None, :] if dim == len(shape) - 1 else dim_owners[:, None]
        at.append(owner_grid)
    ranks = tensor.device_mesh.mesh.numpy()[tuple(at)]
    return ranks, len(rows) * len(columns) < down * across


def _in_words(placement: Any) -> str:
    if isinstance(placement, Replicate):
        return "the same on each rank"
    if isinstance(placement, Partial):
        return f"each rank has a term ({placement.reduce_op})"
    return "as the placement says"


def _bars(content: Strip) -> Any:
    return tag("div", strip(content.owners), class_="wide")
