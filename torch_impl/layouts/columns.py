"""Index arrays of the columns of a Mamba2 projection that each cp rank holds when the heads are sharded.

The columns of in_proj are z|x|B|C|dt; the channels of the convolution are x|B|C. Each of n ranks holds its heads'
columns of z, x and dt, and the columns of B and C of the groups that these heads read. With fewer groups than ranks,
n / groups ranks hold the same group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of a Mamba2 mixer: `head_dim` channels per head, `d_state` columns of B and of C per group."""

    num_heads: int
    head_dim: int
    n_groups: int
    d_state: int

    @property
    def inner(self) -> int:
        """Columns of x, and of z."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Columns of B, and of C; the heads of a group share them."""
        return self.n_groups * self.d_state

    @property
    def blocks(self) -> tuple[int, int, int, int, int]:
        """Columns of z, x, B, C and dt."""
        return self.inner, self.inner, self.shared, self.shared, self.num_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.shared

    @property
    def width(self) -> int:
        """Columns of in_proj."""
        return sum(self.blocks)

    def indivisible(self, cp: int) -> str | None:
        """The reason why heads and groups cannot be sharded over cp ranks, or None.

        >>> MambaSizes(6, 1, 2, 1).indivisible(4)
        'num_heads=6 must be divisible by cp_size=4; use cp=2 or 3, or MambaStatePassing'
        """
        heads, groups = self.num_heads, self.n_groups
        # 1. Heads are never split, and every rank has the same number of heads.
        if heads % cp:
            fits = [str(n) for n in range(2, cp) if heads % n == 0]
            use = f"cp={' or '.join(fits)}, or " if fits else ""
            return f"num_heads={heads} must be divisible by cp_size={cp}; use {use}MambaStatePassing"
        # 2. A rank has complete groups, or heads of a single group; its heads never read parts of two groups.
        if groups < cp and cp % groups:
            return f"cp_size={cp} must be divisible by n_groups={groups} when n_groups < cp_size"
        if groups >= cp and groups % cp:
            return f"n_groups={groups} must be divisible by cp_size={cp}"
        return None

    def local(self, cp: int) -> MambaSizes:
        """The sizes of one rank's shard, over cp ranks."""
        return MambaSizes(self.num_heads // cp, self.head_dim, max(self.n_groups // cp, 1), self.d_state)


def projection_columns(
    sizes: MambaSizes, cp: int, *, device: torch.device | str | None = None
) -> Int64[Tensor, "n width"]:
    """Columns of in_proj that each rank holds, in the local order z|x|B|C|dt.

    >>> projection_columns(MambaSizes(4, 1, 2, 1), 4)[1]
    tensor([ 1,  5,  8, 10, 13])

    Errors: ValueError if the heads or the groups cannot be sharded over cp ranks.
    """
    _check(sizes, cp)
    heads, groups = _shares(sizes.inner, cp, device), _group_columns(sizes, cp, device)
    # Columns count from 0 within z, x, B, C and dt; add the start of each block in in_proj.
    starts = [sum(sizes.blocks[:i]) for i in range(len(sizes.blocks))]
    kinds = (heads, heads, groups, groups, _shares(sizes.num_heads, cp, device))
    return torch.cat([start + kind for start, kind in zip(starts, kinds, strict=True)], dim=1)


def conv_channels(sizes: MambaSizes, cp: int, *, device: torch.device | str | None = None) -> Int64[Tensor, "n c"]:
    """Channels of the convolution that each rank holds, in the local order x|B|C.

    >>> conv_channels(MambaSizes(4, 1, 2, 1), 4)[3]
    tensor([3, 5, 7])

    Errors: as `projection_columns`.
    """
    _check(sizes, cp)
    groups = _group_columns(sizes, cp, device)
    kinds = (_shares(sizes.inner, cp, device), sizes.inner + groups, sizes.inner + sizes.shared + groups)
    return torch.cat(kinds, dim=1)


def _shares(size: int, cp: int, device: torch.device | str | None) -> Tensor:
    """[cp, size / cp]: equal contiguous blocks."""
    return torch.arange(size, device=device).view(cp, -1)


def _group_columns(sizes: MambaSizes, cp: int, device: torch.device | str | None) -> Tensor:
    """[cp, local groups * d_state]: the groups of rank r start at r * n_groups // cp."""
    # With fewer groups than ranks, the division rounds down to the group that the heads of rank r read.
    first = torch.arange(cp, device=device) * sizes.n_groups // cp
    return first[:, None] * sizes.d_state + torch.arange(sizes.local(cp).shared, device=device)


def _check(sizes: MambaSizes, cp: int) -> None:
    if reason := sizes.indivisible(cp):
        raise ValueError(reason)
