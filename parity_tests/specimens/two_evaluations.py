"""A traced function evaluated by NumPy and by XLA: the same values, and tangents of the same rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardproof.judge.compare import element_budgets
from shardproof.judge.reference import UNIT_ROUNDOFF, _rms, compiler_options
from shardproof.judge.rounding import POOL, Trace, by_numpy, by_xla
from shardproof.judge.step import DIRECTIONS

U = UNIT_ROUNDOFF["float64"]
HALF_THE_DIGITS = 2.0**-26  # of float64: a spread, over eight directions, is itself known to a quarter


MAX_OPERATIONS = 500  # XLA compiles the derivative of a longer function for seconds, so it gives only the values


def evaluated_twice(closed: Any, arrays: Sequence[np.ndarray], roundings: int = 1) -> list[str]:
    """The differences between two evaluations of a traced function; floating inputs move by one of their roundoffs.

    `roundings` is the number that the function's scheme declares: a long recurrence rounds more often.
    """
    arrays = [np.asarray(array) for array in arrays]
    has_tangent = [array.dtype.kind == "f" for array in arrays]
    random = np.random.default_rng(0)
    tangents = [
        U * random.choice([-1.0, 1.0], size=(DIRECTIONS, *array.shape)) * np.where(np.isfinite(array), array, 0.0)
        if has
        else None
        for array, has in zip(arrays, has_tangent, strict=True)
    ]
    lost = U * max((np.abs(t).max(initial=0.0) for t in tangents if t is not None), default=0.0)
    tangent_errors = U * random.choice([-1.0, 1.0], size=(DIRECTIONS, POOL))
    trace = Trace(closed)
    with np.errstate(all="ignore"):
        ours = by_numpy(trace, has_tangent)(arrays, tangents, tangent_errors)
    if len(trace.operations) > MAX_OPERATIONS:
        exact = by_xla(Trace(closed, rounded=False), [False] * len(arrays), compiler_options)
        theirs = exact(arrays, [None] * len(arrays), tangent_errors)[0], ours[1]
    else:
        theirs = by_xla(trace, has_tangent, compiler_options)(arrays, tangents, tangent_errors)
    terms = max((n for each in trace.operations for var in each.equation.invars for n in var.aval.shape), default=1)
    differences = []
    for i, (aval, *pairs) in enumerate(zip(closed.out_avals, *ours, *theirs, strict=True)):
        value, tangent, want, want_tangent = (None if each is None else np.asarray(each) for each in pairs)
        if value.shape != aval.shape or value.dtype != aval.dtype:
            differences.append(f"output {i} is {value.dtype}{value.shape}, traced as {aval}")
            continue
        spread, want_spread = (np.zeros(aval.shape) if t is None else _rms(t) for t in (tangent, want_tangent))
        if not _same_values(value, want, want_spread, terms, roundings):
            differences.append(f"output {i} is {value}, {want} by XLA, spread {want_spread}")
        if not _same_spread(spread, want_spread, lost):
            differences.append(f"output {i} has the spread {spread}, {want_spread} by XLA")
        if not _same_tangents(tangent, want_tangent, lost):
            differences.append(f"output {i} has the tangents {tangent}, {want_tangent} by XLA")
    return differences


def _same_values(value: np.ndarray, want: np.ndarray, spread: np.ndarray, terms: int, roundings: int) -> bool:
    """Whether values differ by less than a float64 sum's budget; integers, infinities and NaN must be equal."""
    if value.dtype.kind != "f":
        return bool((value == want).all())
    with np.errstate(invalid="ignore"):
        distance = np.abs(value - want)
    same = (value == want) | (np.isnan(value) & np.isnan(want))
    return bool((same | (distance <= element_budgets(want, spread, terms, "float64", "float64", roundings, U))).all())


def _same_spread(spread: np.ndarray, want: np.ndarray, lost: float) -> bool:
    """Whether spreads are equal up to `lost`, a roundoff of the largest tangent: tangents may cancel to almost 0."""
    return bool((np.abs(spread - want) <= HALF_THE_DIGITS * want.max(initial=0.0) + lost).all())


def _same_tangents(tangent: np.ndarray | None, want: np.ndarray | None, lost: float) -> bool:
    """Whether tangents are finite in the same places and equal there; XLA gives zeros to an output without one."""
    if tangent is None or want is None:
        return not (np.zeros(1) if want is None else want).any() and tangent is None
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(tangent)):
        return False
    distance = np.abs(np.where(finite, tangent, 0.0) - np.where(finite, want, 0.0))
    return bool((distance <= HALF_THE_DIGITS * np.abs(np.where(finite, want, 0.0)).max(initial=0.0) + lost).all())
