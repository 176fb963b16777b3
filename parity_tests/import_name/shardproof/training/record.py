"""The record of a step: the loss, the gradient norm, and each parameter's gradient and new weight, in one file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GRADIENT, WEIGHT = "gradient/", "weight/"


@dataclass(frozen=True)
class Step:
    """One optimiser step in full float64 arrays: the gradients before clipping, and the weights after the step."""

    index: int
    loss: float
    norm: float
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def write(folder: str | Path, step: Step) -> None:
    """Write the record; the file gets its name when it is complete."""
    arrays: dict[str, Any] = {"loss": np.float64(step.loss), "norm": np.float64(step.norm)}
    arrays |= {GRADIENT + name: array for name, array in step.gradients.items()}
    arrays |= {WEIGHT + name: array for name, array in step.weights.items()}
    path = _path(folder, step.index)
    with open(f"{path}.part", "wb") as file:
        np.savez(file, **arrays)
    os.replace(f"{path}.part", path)


def read(folder: str | Path, index: int) -> Step | None:
    """The recorded step, or None if it is not written yet."""
    path = _path(folder, index)
    if not path.is_file():
        return None
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    gradients, weights = (
        {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
        for kind in (GRADIENT, WEIGHT)
    )
    return Step(index, float(arrays["loss"]), float(arrays["norm"]), gradients, weights)


def _path(folder: str | Path, index: int) -> Path:
    return Path(folder) / f"step_{index:06d}.npz"
