"""Rotary positions: each pair of a head's columns is turned by an angle that grows with the position."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_impl.collectives import accumulator


def rotated(x: Float[Tensor, "b h s p"], position_ids: Int[Tensor, " s"], base: float) -> Float[Tensor, "b h s p"]:
    """Columns i and i + p/2 turned by `position * base ** (-2 i / p)`; positions count inside their document.

        x  "b h s/cp p"   position_ids  "s/cp"   ->   "b h s/cp p"

    Cost:   no collective. Angles in float64, since float32 loses the turns of a far position; the product in float32
            or wider.
    Source: arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    each = torch.arange(half, device=x.device, dtype=torch.float64)
    angle = position_ids.to(torch.float64)[:, None] * base ** (-each / half)
    wide = accumulator(x.dtype)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    first, second = x.to(wide).split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
