"""A rank's shard of the logits: the ids of the vocabulary that it owns, and the DTensor of all ranks' shards."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from torch_impl.collectives import MeshView


def owned_range(mesh: MeshView) -> tuple[int, int]:
    """[start, end) of this rank's ids of `v`, which is sharded in rank order; an empty shard owns [0, 0)."""
    ids = mesh.global_ids("v")
    return (int(ids[0]), int(ids[-1]) + 1) if len(ids) else (0, 0)


def group_of_several(mesh: MeshView, axis: str) -> ProcessGroup | None:
    """The group of an axis, or None for one rank, as a caller without this axis passes it."""
    return mesh[axis] if mesh.size(axis) > 1 else None


def wants_no_gradient() -> bool:
    """Whether the scheme is called without gradients: the value that it passes as `inference_only`."""
    return not torch.is_grad_enabled()


def dtensor_of_shards(mesh: MeshView, logits: Tensor, s: int, v: int) -> DTensor:
    """The DTensor of these shards, which may be uneven."""
    full_size = dict(shape=torch.Size((len(logits), s, v)), stride=(s * v, v, 1))
    return DTensor.from_local(logits, mesh.device_mesh, [Shard(1), Shard(2)], **full_size)


def ceil(size: int, world: int) -> list[np.ndarray]:
    """The blocks of DTensor's ceil rule."""
    block = -(-size // world)
    return [np.arange(size)[rank * block : (rank + 1) * block] for rank in range(world)]
