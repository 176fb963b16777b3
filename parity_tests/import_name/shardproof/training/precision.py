"""The stored dtype of each tensor of a run, and FSDP's policy for the tested dtype. Only ranks load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# The dtype of parameters, summed gradients and the optimiser's state, for each tested dtype.
STORED_DTYPE = {"float64": "float64", "float32": "float32", "bfloat16": "float32"}


def policy(dtype: str) -> MixedPrecisionPolicy:
    """FSDP's policy: compute in the tested dtype, and sum gradients in the stored dtype."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if STORED_DTYPE[dtype] == dtype:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=getattr(torch, STORED_DTYPE[dtype]))
