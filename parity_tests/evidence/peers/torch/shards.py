"""DTensors of a rank's part, evenly and unevenly sharded, for the schemes of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard


def chunked(size: int, world: int) -> list[np.ndarray]:
    """The layout of Shard: blocks of ceil(size / world) positions, so that the last ranks may have fewer or none."""
    step = -(-size // world)
    return [np.arange(min(rank * step, size), min((rank + 1) * step, size)) for rank in range(world)]


def sharded(mesh: Any, local: torch.Tensor, dim: int, total: int) -> DTensor:
    """A DTensor with `local` on this rank and `total` positions along `dim`, on a mesh of one axis."""
    shape = list(local.shape)
    shape[dim] = total
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh.device_mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated(mesh: Any, local: torch.Tensor) -> DTensor:
    """The DTensor of a tensor that each rank has."""
    return DTensor.from_local(local, mesh.device_mesh, [Replicate()], run_check=False)
