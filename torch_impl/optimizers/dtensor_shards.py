"""The shards of a DTensor: the length of every rank's shard, and this rank's local tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def chunk_lengths(size: int, world: int) -> tuple[int, ...]:
    """The number of elements on each rank if torch.chunk splits `size` elements; the last ranks may have none."""
    longest = -(-size // world)
    return tuple(min(longest, max(size - rank * longest, 0)) for rank in range(world))


def local_tensor(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor is returned unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x
