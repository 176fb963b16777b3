"""A case is undecided where the reference itself jumps within the rounding of its inputs: no one value is right there.

A budget is of first order. Where rounding changes which expert a token goes to, which of two equal numbers is the
greatest, or what is sorted before what, results differ by far more than any derivative says, and both are right. So
before a mismatch is reported the reference is evaluated again at inputs that are moved by about their rounding, with
real steps. The case says nothing if every wrong element lies within the range of the reference's own values there; one
that the reference never comes near is a mistake, however the reference jumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.draw import inputs
from parity_tests.harness.judge import compare
from parity_tests.harness.judge.reference import UNIT_ROUNDOFF, evaluate
from parity_tests.harness.report.report import Report
from parity_tests.harness.run.program import Program
from parity_tests.harness.verdict import judge

DIRECTIONS = 16
ENOUGH = 4  # directions after which a case where no wrong element has jumped is called a mismatch
FEW = 4  # times that each number occurs in a narrow dtype, for equal ones to be meant
STEPS = 2.0  # roundings to the tested dtype that an input is moved by at most; a budget has room for eight
TIE = "equal inputs have no one order or gradient; with distinct ones all is equal"
CHOICE = "the reference jumps as far within the rounding of its inputs"


def verdict_of(scheme: Declared, case: CaseSpec) -> Report:
    """The report of a case; one that fails is looked at again, and may be undecided."""
    report = judge(scheme, case)
    return report if report.ok else mark_undecided(scheme, report)


def mark_undecided(scheme: Declared, report: Report) -> Report:
    """The report, undecided if the reference jumps as far as every wrong element and nothing else is wrong."""
    wrong = [row for row in report.rows if not row.ok]
    if report.failure is not None or report.protocol or report.cost or report.hygiene or not wrong:
        return report
    if not _jumps_as_far(scheme, report.case, wrong):
        return report
    why = TIE if _is_tie(scheme, report.case) else CHOICE
    return replace(report, undecided=why, undecided_why=why, undecided_examples=1, notes={})


def _is_tie(scheme: Declared, case: CaseSpec) -> bool:
    """Whether inputs have equal numbers, not by chance of a narrow dtype, and all is right once they are distinct."""
    program = Program.of(scheme)
    full = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    floating = [arg.name for arg in scheme.inputs if not arg.is_integer]
    by_chance = 1 if UNIT_ROUNDOFF[case.dtype] <= UNIT_ROUNDOFF["float32"] else FEW
    if not any(np.unique(full[name]).size * by_chance < full[name].size for name in floating):
        return False
    distinct = {name: _distinct(x, case) if name in floating else x for name, x in full.items()}
    return judge(scheme, case, arrays=distinct).ok


def _jumps_as_far(scheme: Declared, case: CaseSpec, rows: Sequence[compare.TensorRow]) -> bool:
    """Whether each wrong element of these tensors lies within the range of the moved references' values."""
    jumps = [_Jumps(row) for row in rows]
    for count, arrays in enumerate(_moved(scheme, case), start=1):
        reference = evaluate(scheme, Program.of(scheme, arrays=arrays), case)
        for jump in jumps:
            values = reference.outputs if jump.row.role == "output" else reference.gradients
            jump.include(np.asarray(values[jump.row.name]))
        unexplained = [jump.unexplained() for jump in jumps]
        if not any(mask.any() for mask in unexplained):
            return True
        if count == ENOUGH and all((mask == jump.wrong).all() for mask, jump in zip(unexplained, jumps, strict=True)):
            return False
    return False


class _Jumps:
    """The range of the reference's values for one tensor, element by element, as its inputs move by their rounding."""

    def __init__(self, row: compare.TensorRow) -> None:
        self.row = row
        self.wrong = compare.wrong_elements(row)
        self._lowest = self._highest = row.want
        self._is_nan = np.isnan(row.want)

    def include(self, values: np.ndarray) -> None:
        """Extend the range by the values of one more reference."""
        self._lowest = np.fmin(self._lowest, values)
        self._highest = np.fmax(self._highest, values)
        self._is_nan = self._is_nan | np.isnan(values)

    def unexplained(self) -> np.ndarray:
        """The wrong elements of which some copy lies outside the range by more than the budget, or has no gradient."""
        outside = np.zeros(self.wrong.shape, bool) if self.row.absent is None else self.row.absent
        for copy in self.row.stitched.copies:
            above, below = copy > self._highest + self.row.budgets, copy < self._lowest - self.row.budgets
            outside = outside | above | below | (np.isnan(copy) & ~self._is_nan)
        return self.wrong & outside


def _moved(scheme: Declared, case: CaseSpec) -> Iterator[dict[str, np.ndarray]]:
    """Inputs moved by about their rounding: equal numbers in rising order, in falling order, then all at random."""
    program = Program.of(scheme)
    full = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    for direction in range(DIRECTIONS):
        arrays = dict(full)
        for arg in scheme.inputs:
            if not arg.is_integer:
                x = full[arg.name]
                rng = inputs.generator(case, f"moved {direction} {arg.name}")
                rising = np.linspace(-1.0, 1.0, x.size).reshape(x.shape)
                random = rng.choice((-1.0, 1.0), x.shape) * rng.uniform(0.5, 1.0, x.shape)
                arrays[arg.name] = x + _steps(x, case) * (rising, -rising, random)[min(direction, 2)]
        yield arrays


def _steps(x: np.ndarray, case: CaseSpec) -> np.ndarray:
    """How far each number is moved: by its own rounding; one that occurs twice also by that of the others."""
    size = np.where(np.isfinite(x), np.abs(x), 0.0)
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    tied = (counts[inverse.reshape(x.shape)] > 1) & np.isfinite(x)
    return STEPS * UNIT_ROUNDOFF[case.dtype] * np.where(tied, np.maximum(size, _typical(x)), size)


def _typical(x: np.ndarray) -> float:
    """The median size of the numbers that are not 0; several zeros move by the rounding of such a number."""
    sizes = np.abs(x[np.isfinite(x) & (x != 0.0)])
    return float(np.median(sizes)) if sizes.size else 0.0


def _distinct(x: np.ndarray, case: CaseSpec) -> np.ndarray:
    """Numbers of the tested dtype in the same order, no two of them equal; infinities stay."""
    flat = x.ravel()
    finite = np.isfinite(flat)
    unit = 4.0 * UNIT_ROUNDOFF[case.dtype]
    typical = _typical(x) or 1.0
    result, last = flat.copy(), -np.inf
    for index in np.flatnonzero(finite)[np.argsort(flat[finite], kind="stable")]:
        step = unit * max(abs(last), typical) if np.isfinite(last) else 0.0
        last = flat[index] if flat[index] > last else last + step
        result[index] = last
    return inputs.rounded(result.reshape(x.shape), case.dtype)
