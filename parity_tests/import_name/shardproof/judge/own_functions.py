"""The functions of numpy, JAX and Python that compute a verdict, which a user's code must not replace.

A replaced `numpy.abs` could make every error 0. They are remembered when this module is imported, which is before the
files of schemes.
"""

from __future__ import annotations

import builtins
import math
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MODULES: tuple[ModuleType, ...] = (np, np.linalg, math, jax, jax.lax, jnp)
OF_PYTHON = ("abs", "all", "any", "max", "min", "sorted", "sum")


def _functions(module: ModuleType) -> dict[str, Any]:
    names = OF_PYTHON if module is builtins else vars(module)
    members = {name: vars(module).get(name) for name in names}
    return {name: each for name, each in members.items() if callable(each) and not isinstance(each, type)}


_BEFORE = MappingProxyType({module: _functions(module) for module in (*MODULES, builtins)})
_VALUES = MappingProxyType({module: tuple(functions.values()) for module, functions in _BEFORE.items()})


def check() -> None:
    """ValueError if a function has been replaced since the import of this module."""
    for module, functions in _BEFORE.items():
        now = vars(module)
        if tuple(map(now.get, functions)) == _VALUES[module]:  # without `all`, which is one of them
            continue
        for name, function in functions.items():
            if now.get(name, function) is not function:
                raise ValueError(
                    f"{module.__name__}.{name} has been replaced, and verdicts are computed with it; give your own "
                    "function another name"
                )
