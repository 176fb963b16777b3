"""Float64 all through: transformers computes norms and rotary angles in float32 whatever the model's dtype.

Under this mode whoever asks for float32 gets float64, so that a float64 model differs from the mathematics by float64's
rounding alone. A model is built under it, and the modules that narrow enter it whenever they compute: backward, where
they compute again, knows no mode that stood around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NARROWING = ("RMSNorm", "RotaryEmbedding")


class Float64Throughout(TorchFunctionMode):
    """Each request for float32 is one for float64; so is that for a float without a dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.tensor and isinstance(args[0], float):
            given.setdefault("dtype", torch.float64)
        return func(*map(_widened, args), **given)


def keep_float64(model: nn.Module) -> None:
    """Have the modules that narrow compute in float64, in place."""
    for module in model.modules():
        if type(module).__name__.endswith(NARROWING):
            module.forward = _throughout(module.forward)


def _throughout(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Float64Throughout():
            return forward(*args, **kwargs)

    return wide


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
