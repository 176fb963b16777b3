"""What a rank has of a DTensor: how many of a dim's elements each rank has, and this rank's tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def chunk_lengths(size: int, world: int) -> tuple[int, ...]:
    """How many of `size` elements each rank has: as torch.chunk shares them, so that the last ones may have none."""
    longest = -(-size // world)
    return tuple(min(longest, max(size - rank * longest, 0)) for rank in range(world))


def local_tensor(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return x.to_local() if isinstance(x, DTensor) else x
