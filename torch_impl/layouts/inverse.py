"""The way back from the rank-major stream to the order of positions, as an index array."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor


def inverse(positions: Sequence[Int64[Tensor, " _"]]) -> Int64[Tensor, " _"]:
    """`inverse[p]` is the row of position p in cat(rank 0, rank 1, ...): `sequential = rank_major[inverse]`.

    >>> inverse([torch.tensor([0, 3]), torch.tensor([1, 2])])
    tensor([0, 2, 3, 1])
    """
    rank_major = torch.cat(list(positions))
    rows = torch.arange(len(rank_major), device=rank_major.device)
    return torch.empty_like(rank_major).scatter_(0, rank_major, rows)
