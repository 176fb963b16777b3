"""A kernel compared with its eager twin: the twin's result in float64, and the harness' budget for each element.

The budget's spread is the twin's change under random roundings of its inputs to the accumulation dtype. Both get the
same inputs, so an input's own dtype, however narrow, adds no error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shardproof.judge import compare
from shardproof.judge.reference import UNIT_ROUNDOFF

DIRECTIONS = 8
ROUNDINGS = 3  # mean shifted logit, log-probability, result


def worst_ratio(got: Tensor, twin: Callable[..., Tensor], floats: Sequence[Tensor | None], terms: int) -> float:
    """The largest error over budget, of a result in the accumulation dtype; `floats` are the twin's inputs."""
    dtype = str(got.dtype).removeprefix("torch.")
    unit = UNIT_ROUNDOFF[dtype]
    wide = [None if x is None else x.double().cpu() for x in floats]
    want = twin(*wide).numpy()
    # Move inputs twice as far and halve the change: in float64, 1 + 2**-53 would round to 1.
    nearby = [
        [None if x is None else _perturbed(x, 2 * unit, (seed, place)) for place, x in enumerate(wide)]
        for seed in range(DIRECTIONS)
    ]
    moved = [twin(*inputs).numpy() for inputs in nearby]
    with np.errstate(invalid="ignore"):
        distances = np.nan_to_num(np.stack(moved) - want, nan=0.0, posinf=0.0, neginf=0.0) / 2
    spread = np.sqrt((distances**2).mean(0))
    allowed = compare.element_budgets(want, spread, terms, dtype, dtype, ROUNDINGS, unit)
    ratios = compare.errors(got.double().cpu().numpy(), want, dtype) / allowed
    return float(ratios.max(initial=0.0))


def _perturbed(x: Tensor, far: float, key: tuple[int, int]) -> Tensor:
    signs = np.random.Generator(np.random.Philox(key=list(key))).integers(0, 2, tuple(x.shape)) * 2 - 1
    return x * (1.0 + far * torch.from_numpy(signs).double())
