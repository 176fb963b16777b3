"""Which ids a rank owns: shards are contiguous in rank order and may differ in width."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from torch_impl.collectives.plain import gathered


def gathered_range(width: int, group: ProcessGroup, device: torch.device) -> tuple[int, int]:
    """[start, end) of this rank's ids, from the widths of all ranks. One all_gather of one int64, one host read."""
    own = torch.tensor([width], device=device)
    ends = gathered(own, group, 0, [1] * group.size()).cumsum(0)
    end = int(ends[group.rank()])
    return end - width, end


def ceil_range(size: int, world: int, rank: int) -> tuple[int, int]:
    """[start, end) of one rank's ids by DTensor's rule: blocks of ceil(size / world) while they last.

    >>> [ceil_range(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    block = -(-size // world)
    return min(rank * block, size), min((rank + 1) * block, size)
