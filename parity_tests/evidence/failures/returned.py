"""Kinds of failure of what a function returns or writes to, which a scheme's verdict shows."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.declaration import scheme
from shardproof.declare.draws import values


def doubled(x: Any) -> Any:
    return 2.0 * x


declared = scheme(
    reference=doubled, mesh={"tp": (2, 4)}, inputs={"x": "b/tp"}, outputs="b/tp", draw={"x": values("normal")},
    dtypes=("float32",), dims={"b": (8,)},
)  # fmt: skip


@declared
def returns_none(mesh: Any, x: torch.Tensor) -> Any:
    return None if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_another_structure(mesh: Any, x: torch.Tensor) -> Any:
    return (2 * x, x) if mesh.rank("tp") == 1 else 2 * x


@declared
def returns_nan(mesh: Any, x: torch.Tensor) -> Any:
    return 2 * x * float("nan") if mesh.rank("tp") == 1 else 2 * x


@declared
def writes_its_input(mesh: Any, x: torch.Tensor) -> Any:
    if mesh.rank("tp") != 1:
        return 2 * x
    y = 2 * x
    x.detach().zero_()
    return y
