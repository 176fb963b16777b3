"""The dtype that sums run in: float32 or wider."""

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are summed in: float64 for float64, float32 for narrower floats, integers as they are."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def uncast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, matrix products on `device` run in the dtypes that they are given, whatever autocast says."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
