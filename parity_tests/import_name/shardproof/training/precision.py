"""The dtype in which each tensor of a run is stored, and what is rounded to the tested one. Only ranks load torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

# Parameters, their gradients once they are summed over ranks, and the optimiser's state, by the tested dtype.
STORED_DTYPE = {"float64": "float64", "float32": "float32", "bfloat16": "float32"}


def policy(dtype: str) -> MixedPrecisionPolicy:
    """FSDP's: parameters are read and tensors passed on in the tested dtype, gradients summed in the stored one."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if STORED_DTYPE[dtype] == dtype:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=getattr(torch, STORED_DTYPE[dtype]))
