"""A case is undecided where the reference itself jumps within the rounding of its inputs: no one value is right there.

A budget is of first order. Where rounding changes which expert a token goes to, which of two equal numbers is the
greatest, or what is sorted before what, results differ by far more than any derivative says, and both are right. So
before a mismatch is reported the reference is evaluated again at inputs that are moved by about their rounding, with
real steps; where it moves by more than the budget at every wrong element, the case says nothing. A mistake is wrong at
other elements too, or in other examples.
"""

from __future__ import annotations

from collections.abc import Iterator
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
CHOICE = "the reference jumps within the rounding of its inputs, at each wrong element"


def decided(scheme: Declared, case: CaseSpec) -> Report:
    """The report of a case; one that fails is looked at again, and may be undecided."""
    report = judge(scheme, case)
    return report if report.ok else second_look(scheme, report)


def second_look(scheme: Declared, report: Report) -> Report:
    """The report, undecided if the reference jumps at every wrong element and nothing else is wrong."""
    wrong = {row.label: compare.wrong_elements(row) for row in report.rows if not row.ok}
    if report.failure is not None or report.protocol or report.cost or report.hygiene or not wrong:
        return report
    if not _jumps_at(scheme, report, wrong):
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


def _jumps_at(scheme: Declared, report: Report, wrong: dict[str, np.ndarray]) -> bool:
    """Whether the reference moves by more than its budget at all of these elements."""
    jumped = {label: np.zeros(mask.shape, bool) for label, mask in wrong.items()}
    for count, arrays in enumerate(_moved(scheme, report.case), start=1):
        reference = evaluate(scheme, Program.of(scheme, arrays=arrays), report.case)
        for row in report.rows:
            if row.label in wrong:
                values = reference.outputs if row.role == "output" else reference.gradients
                jumped[row.label] |= compare.beyond_budget(row, np.asarray(values[row.name]))
        if all(jumped[label][mask].all() for label, mask in wrong.items()):
            return True
        if count == ENOUGH and not any(jumped[label][mask].any() for label, mask in wrong.items()):
            return False
    return False


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
