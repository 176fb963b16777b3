"""Tensors that are not contiguous, in the gallery: some functions pass them to a backend unchanged.

NCCL rejects such a tensor, and gloo's result for it is a separate finding. Schemes of these functions are called with
contiguous tensors; other schemes show the result for a transposed tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from shardproof.declare.conditions import EXCLUDED_BY_DEFAULT

CONTIGUOUS: dict[str, Any] = {"excluded_conditions": (*EXCLUDED_BY_DEFAULT, "strided", "expanded")}


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view with the last two dims swapped in memory."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT
