"""Equality to the last digits, for results that other strides or blocks give."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = 2  # exp2 is within one of the true value, and rounds a vector's end otherwise than its middle


def equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by no more than a few roundings of their largest entry."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.numel():
        return a.shape == b.shape and a.dtype == b.dtype
    distance = torch.where(a == b, 0.0, (a - b).abs()).max()  # infinities are equal or not
    largest = torch.where(b.isfinite(), b.abs(), 0.0).max()
    return bool(distance <= ROUNDINGS * torch.finfo(a.dtype).eps * largest)
