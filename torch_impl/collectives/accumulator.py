"""The dtype that sums run in: float32 or wider."""

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are summed in: float64 for float64, float32 for narrower floats, integers as they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
