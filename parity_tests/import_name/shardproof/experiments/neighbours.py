"""Neighbours of a case: the same inputs a rounding or two away, to see how far the reference jumps between them.

A number is changed by its own rounding. Equal numbers are separated by the rounding of typical numbers, because ties
are where choices are made, and a zero leaves its place, where many functions have a kink; a product below the tested
dtype's numbers may be zero; equal infinities, which no small step separates, become distinct large numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.draws import max_drawn
from shardproof.draw import inputs
from shardproof.engines.program import Program
from shardproof.judge.compare import lost_below
from shardproof.judge.reference import UNIT_ROUNDOFF, Reference, evaluate, operation_errors, unit_of_inputs
from shardproof.judge.rounding import Underflow

MOST_NEIGHBOURS = 160
MAX_ROUNDINGS = 2.0  # largest change of an input in roundings; a budget allows eight
UNDERFLOW = (1.0, 0.0, -1.0)  # a number below the tested dtype's is kept, becomes 0, or changes its sign
INFINITY_RATIO = 8.0  # last over first of separated infinities


@dataclass(frozen=True)
class Neighbour:
    """Inputs a rounding away, and errors for the values of the reference's operations: relative ones, and underflow."""

    arrays: dict[str, np.ndarray]
    value_errors: np.ndarray
    underflow: Underflow
    is_near: bool  # no infinity was separated

    def reference(self, scheme: Declared, case: CaseSpec) -> Reference:
        return evaluate(scheme, Program.of(scheme, arrays=self.arrays), case, self.value_errors, self.underflow)


def neighbours(scheme: Declared, case: CaseSpec, *, infinities: bool = False) -> Iterator[Neighbour]:
    """Equal numbers in rising order and in falling order, then at random and with another largest number in each row.

    With `infinities`, equal infinities too.
    """
    program = Program.of(scheme)
    full = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    unit = unit_of_inputs(scheme, case)
    for direction in range(MOST_NEIGHBOURS):
        arrays = dict(full)
        for arg in scheme.inputs:
            if not arg.is_integer:
                rng = inputs.generator(case, f"moved {direction} {arg.name}")
                arrays[arg.name] = _neighbour(full[arg.name], case, unit, direction, rng, infinities)
        underflow = Underflow(lost_below(case.dtype), UNDERFLOW[direction % len(UNDERFLOW)])
        # Errors of operations would undo the order of a rotated row.
        errors = operation_errors(scheme, case, f"operations {direction}") * (_rotation(direction) is None)
        yield Neighbour(arrays, errors, underflow, not infinities)


def _rotation(direction: int) -> int | None:
    """How far the rising order of a row is rotated: once more in each fourth direction and in the one before it."""
    return direction // 4 if direction >= 4 and direction % 4 >= 2 else None


def has_equal_infinities(scheme: Declared, case: CaseSpec) -> bool:
    """Whether two elements of an input are the same infinity."""
    program = Program.of(scheme)
    full = (program.full_array(arg, case) for arg in scheme.inputs if not arg.is_integer)
    return any(max(np.isposinf(x).sum(), np.isneginf(x).sum()) > 1 for x in full)


def distinct(x: np.ndarray, case: CaseSpec) -> np.ndarray:
    """Distinct numbers of the tested dtype in the same order; equal infinities become large numbers."""
    x = _separate_infinities(x, case, np.arange(x.size).reshape(x.shape))
    flat = x.ravel()
    finite = np.isfinite(flat)
    unit = 4.0 * UNIT_ROUNDOFF[case.dtype]
    typical = _typical(x)
    result, last = flat.copy(), -np.inf
    for index in np.flatnonzero(finite)[np.argsort(flat[finite], kind="stable")]:
        step = unit * max(abs(last), typical) if np.isfinite(last) else 0.0
        last = flat[index] if flat[index] > last else last + step
        result[index] = last
    return inputs.rounded(result.reshape(x.shape), case.dtype)


def _neighbour(
    x: np.ndarray, case: CaseSpec, unit: float, direction: int, rng: np.random.Generator, infinities: bool
) -> np.ndarray:
    rotation = _rotation(direction)
    # Of each two directions, one separates equal numbers by the rounding of typical numbers; the other by their own, or
    # by that of ones, where typical numbers are large.
    typical = _typical(x)
    separation = typical if direction % 2 == 0 else 0.0 if rotation is None else min(typical, 1.0)
    rising = np.linspace(-1.0, 1.0, x.size).reshape(x.shape)
    if rotation is not None:  # each of a row's equal numbers becomes the largest, the second, and so on
        signs = np.broadcast_to(np.roll(np.linspace(-1.0, 1.0, x.shape[-1] if x.shape else 1), rotation), x.shape)
    elif direction < 4:
        signs = rising if direction < 2 else -rising
    else:
        signs = rng.choice((-1.0, 1.0), x.shape) * rng.uniform(0.5, 1.0, x.shape)
    neighbour = x + _max_changes(x, unit, separation, case.dtype) * signs
    if not infinities:
        return neighbour
    return _separate_infinities(neighbour, case, signs.ravel().argsort().argsort().reshape(x.shape))


def _max_changes(x: np.ndarray, unit: float, separation: float, dtype: str) -> np.ndarray:
    """The largest change of each number: its own rounding; for a zero, the least numbers.

    For zeros and repeated numbers, at least the rounding of `separation`.
    """
    size = np.where(np.isfinite(x), np.abs(x), 0.0)
    size = np.where(x == 0.0, lost_below(dtype) / unit, size)
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    is_tied = ((counts[inverse.reshape(x.shape)] > 1) | (x == 0.0)) & np.isfinite(x)
    return MAX_ROUNDINGS * unit * np.where(is_tied, np.maximum(size, separation), size)


def _typical(x: np.ndarray) -> float:
    """The median size of the nonzero numbers, whose rounding separates equal zeros; 1 if all are 0."""
    sizes = np.abs(x[np.isfinite(x) & (x != 0.0)])
    return float(np.median(sizes)) if sizes.size else 1.0


def _separate_infinities(x: np.ndarray, case: CaseSpec, order: np.ndarray) -> np.ndarray:
    """Replace equal infinities by large numbers of the tested dtype, increasing in this order."""
    for sign in (1.0, -1.0):
        equal = x == sign * np.inf
        if equal.sum() > 1:
            share = order / max(x.size, 1)
            size = max_drawn(case.dtype) / (2.0 * INFINITY_RATIO)
            x = np.where(
                equal, sign * size * (1.0 + (INFINITY_RATIO - 1.0) * np.where(sign > 0, share, 1.0 - share)), x
            )
    return x
