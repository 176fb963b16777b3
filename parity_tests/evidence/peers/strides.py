"""Calls of the gallery with tensors that are not contiguous: some functions hand theirs to a backend as it is.

NCCL rejects such a tensor, and gloo's result for it is a finding of its own. Schemes of these functions are called
with contiguous tensors; others beside them show the result for a transposed one.
"""

from __future__ import annotations

from typing import Any

import torch

from shardproof.declare.conditions import EXCLUDED_BY_DEFAULT

CONTIGUOUS: dict[str, Any] = {"excluded_conditions": (*EXCLUDED_BY_DEFAULT, "strided", "expanded")}


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view with the last two dims swapped in memory."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT
