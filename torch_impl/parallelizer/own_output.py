"""Outputs of a model that are views, as tensors of their own.

The head of a tensor-parallel model ends in a view of what DTensor gathered. FSDP hangs its backward on the tensors that
the root returns, and an operation in place on a view (`logits.div_(temperature)`) would drop that silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_impl.parallelizer._torch_compat import map_tensors


def return_no_views(model: nn.Module) -> None:
    """Have the model return no views, in place; to be called before FSDP takes the model. Nothing is copied."""
    model.register_forward_hook(_owned)


def _owned(module: nn.Module, arguments: Any, output: Any) -> Any:
    return map_tensors(lambda x: _Own.apply(x) if x._is_view() and x.requires_grad else x, output)


class _Own(torch.autograd.Function):
    """The same memory under another tensor, with its version: autograd still sees an edit of what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent
