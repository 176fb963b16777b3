"""Which ids of the vocabulary a rank owns, as its functions take it."""

from __future__ import annotations

from torch_impl.collectives import MeshView


def owned_range(mesh: MeshView, dim: str = "v") -> tuple[int, int]:
    """[start, end) of this rank's ids of a dim that is sharded in rank order; an empty shard owns [0, 0)."""
    ids = mesh.global_ids(dim)
    return (int(ids[0]), int(ids[-1]) + 1) if len(ids) else (0, 0)
