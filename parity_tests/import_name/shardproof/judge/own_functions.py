"""The functions of numpy, JAX, torch and Python that compute a verdict, which a user's code must not replace.

A replaced `numpy.abs` or `Tensor.numpy` could make every error 0. They are remembered when this module is imported,
which is before the files of schemes.
"""

from __future__ import annotations

import builtins
import math
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

MODULES: tuple[ModuleType, ...] = (np, np.linalg, math, jax, jax.lax, jnp)
OF_PYTHON = ("abs", "all", "any", "max", "min", "sorted", "sum")
# Make arrays of inputs and results, tell whether an input has been changed, and know the least number of a dtype.
OF_TORCH = (
    (torch.Tensor, "contiguous"),
    (torch.Tensor, "double"),
    (torch.Tensor, "numpy"),
    (torch.Tensor, "to"),
    (torch, "equal"),
    (torch, "finfo"),
    (torch, "from_numpy"),
    (torch, "tensor"),
)


def _functions(module: ModuleType) -> dict[str, Any]:
    names = OF_PYTHON if module is builtins else vars(module)
    members = {name: vars(module).get(name) for name in names}
    return {name: each for name, each in members.items() if callable(each) and not isinstance(each, type)}


_BEFORE = MappingProxyType({module: _functions(module) for module in (*MODULES, builtins)})
_OF_TORCH = tuple(getattr(owner, name) for owner, name in OF_TORCH)
_VALUES = MappingProxyType({module: tuple(functions.values()) for module, functions in _BEFORE.items()})


def check() -> None:
    """ValueError if a function has been replaced since the import of this module."""
    for module, functions in _BEFORE.items():
        now = vars(module)
        if tuple(map(now.get, functions)) == _VALUES[module]:  # not by `all`, which may be replaced too
            continue
        for name, function in functions.items():
            if now.get(name, function) is not function:
                raise _replaced(f"{module.__name__}.{name}")
    for (owner, name), before in zip(OF_TORCH, _OF_TORCH, strict=True):
        if getattr(owner, name) is not before:
            raise _replaced(f"{'torch' if owner is torch else 'torch.Tensor'}.{name}")


def _replaced(name: str) -> ValueError:
    return ValueError(
        f"{name} has been replaced, and verdicts are computed with it; give your own function another name"
    )
