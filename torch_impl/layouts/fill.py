"""The number that fills positions behind a sequence, as a tensor's dtype has it."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_impl.contract import Rejected, TypeProblem, dtype_name, type_name


@dataclass(frozen=True)
class _Fill:
    """A bool or a real number, also infinite or NaN. `fill_of` compares it with a tensor's dtype."""

    def problem(self, value: Any) -> str | None:
        return (
            None if isinstance(value, numbers.Real) else TypeProblem(f"={value!r} is {type_name(value)}; pass a number")
        )


Fill = Annotated[float, _Fill()]


def fill_of(tensor: Tensor, fill_value: float | int, name: str = "fill_value") -> float | int:
    """`fill_value` as a number that the tensor's dtype represents exactly; torch would wrap or truncate it silently.

    `name` is the caller's name for it.
    Errors: TypeError unless it is a real number, ValueError if the dtype cannot represent it.
    """
    dtype = tensor.dtype
    if not isinstance(fill_value, numbers.Real) or (isinstance(fill_value, bool) and dtype != torch.bool):
        raise Rejected(f"{name}={fill_value!r} is {type_name(fill_value)}; pass a number", TypeError)
    if dtype.is_floating_point or dtype.is_complex:
        fits = not torch.finfo(dtype).max < abs(fill_value) < math.inf  # infinities and NaN fit
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        fits = low <= fill_value <= high and fill_value == int(fill_value)
    if not fits:
        raise Rejected(f"{name}={fill_value} is not a value of {dtype_name(tensor)}; pass one, or convert the tensor")
    return float(fill_value) if dtype.is_floating_point or dtype.is_complex else int(fill_value)
