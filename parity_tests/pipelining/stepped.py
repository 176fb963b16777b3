"""A step that leaves gradients behind, as a function whose backward gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Stepped(torch.autograd.Function):
    """`run` returns the loss and, by name, the gradients after a backward of 1; other names get 0."""

    @staticmethod
    def forward(ctx: Any, run: Any, names: tuple[str, ...], *values: Tensor) -> Tensor:
        with torch.enable_grad():
            loss, ctx.gradients = run(*(value.detach() for value in values))
        ctx.names, ctx.like = names, values
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        pairs = zip(ctx.names, ctx.like, strict=True)
        gradients = [
            ctx.gradients[name] * cotangent if name in ctx.gradients else torch.zeros_like(x) for name, x in pairs
        ]
        return None, None, *gradients
