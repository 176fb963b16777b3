"""Logits of which no rounding decides what top-p keeps, so that kept sets can be compared token by token.

A row whose mass before some token lies within the budget of top_p is drawn anew. Rows of equal logits need no
budget where p is a fraction of 1024: their masses are counts, and exact. What holds on the rows that are left out
is a matter of mass; test_sampling.py looks for those rows and asks them that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from shardproof.declare.case import CaseSpec
from shardproof.declare.draws import FLOAT_KINDS, Draw
from shardproof.draw import inputs
from shardproof.judge.compare import C
from shardproof.judge.reference import accumulator_roundoff

TRIES = 100
EXACT = 1024


@dataclass(frozen=True)
class DecidedRows(Draw):
    """Floating values of the given kinds, row after row far enough from the case's own top_p."""

    def build(self, value: dict[str, Any], shape: tuple[int, ...], rng: Generator, case: CaseSpec) -> np.ndarray:
        rows = inputs.rounded(super().build(value, shape, rng, case), case.dtype)
        if value["kind"] == "zeros":  # of both signs, which are equal logits with different bits
            rows = np.copysign(rows, rng.standard_normal(shape))
        for _ in range(TRIES):
            undecided = is_undecided(rows, case.options, case.dtype)
            if not undecided.any():
                return rows
            rows = np.where(undecided[..., None], inputs.rounded(rng.standard_normal(shape), case.dtype), rows)
        raise ValueError(f"no row of {shape[-1]} logits is far enough from top_p={case.options['top_p']}")


def decided_rows(*kinds: str, nan_rows: Callable[..., Any] | None = None) -> DecidedRows:
    """Rows of the given kinds, none given: of all; the case's options are top_k, top_p and temperature.

    `nan_rows` is that of `values`: the rows that may hold NaN.
    """
    return DecidedRows("float", kinds=kinds or FLOAT_KINDS, nan_rows=nan_rows)


def is_undecided(rows: np.ndarray, options: dict[str, Any], dtype: str) -> np.ndarray:
    """Of each row: whether the mass before some token is so near top_p that rounding may say on which side."""
    top_p = options["top_p"]
    if top_p is None or top_p == 1.0 or not rows.shape[-1]:
        return np.zeros(rows.shape[:-1], dtype=bool)
    before, equal = mass_before(rows, options)
    is_near = (np.abs(before[..., 1:] - top_p) <= mass_budget(rows.shape[-1], dtype)).any(-1)
    return is_near & ~(equal & (top_p * EXACT == round(top_p * EXACT)))


def mass_before(rows: np.ndarray, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(mass before each token in descending order, after top-k and min-p; whether all kept logits are equal)."""
    descending = -np.sort(-rows, axis=-1)
    weights = np.exp((descending - descending[..., :1]) / options["temperature"])
    top_k = options["top_k"]
    if top_k is not None and 0 < top_k < rows.shape[-1]:
        weights = np.where(descending >= descending[..., top_k - 1, None], weights, 0.0)
    weights = np.where(weights >= (options.get("min_p") or 0.0), weights, 0.0)
    upto = weights.cumsum(-1)
    return (upto - weights) / upto[..., -1:], np.isin(weights, (0.0, 1.0)).all(-1)


def mass_budget(size: int, dtype: str) -> float:
    """What a sum of so many masses may be off by: a sum's budget, each mass exp(d) off by up to |d| roundings.

    In the mean over the masses |d| is at most the entropy, and that at most log V.
    """
    return C * accumulator_roundoff(dtype) * math.sqrt(size) * (1.0 + math.log(size))
