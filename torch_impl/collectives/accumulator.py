"""The dtype that sums run in: float32 or wider."""

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every narrower float; integers and booleans stay as they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
