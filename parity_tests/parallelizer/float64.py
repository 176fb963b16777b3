"""Float64 all through: transformers computes norms, rotary angles and softmax in float32 whatever the model's dtype.

Under this mode whoever asks for float32 gets float64, so that a float64 model differs from the mathematics by float64's
rounding alone. It holds on the thread that entered it, in forward, recomputation and the building of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """Each request for float32 is one for float64; so is that for a float without a dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = {name: widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.tensor and isinstance(args[0], float):
            given.setdefault("dtype", torch.float64)
        return func(*map(widened, args), **given)


def widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
