"""Whether an error comes from rounding: the same case in wider dtypes, at moved inputs, at larger ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw import inputs
from shardproof.engines.program import Program
from shardproof.experiments import cases
from shardproof.judge.compare import COARSER, TensorComparison, beyond_budget, max_finite
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

WIDER = ("float64", "float32")
ROUNDINGS_OFF = 8  # each input is changed by this many roundings of the narrower dtype
LARGER = 16.0  # a power of 2, so that the inputs' own digits stay
SPREAD = 8.0  # rounding varies by less, on few elements too; an error that stays as it is shrinks by LARGER or more
FEW = 0.05  # largest share of the elements
MOVES = 3  # of a rounding that few elements hold, three in ten look alike after one
MIN_ELEMENTS = 8  # in smaller tensors, two errors may be alike by chance


def vanishes(scheme: Declared, report: Report, label: str) -> bool | None:
    """Whether the error of a tensor comes from rounding; None if no run can tell.

    A rounding error vanishes in a wider dtype, and changes completely when the inputs change slightly; a mistake hardly
    changes then. A branch for one dtype could make a mistake vanish as well, so an error that vanishes must also change
    or, unless only a few elements are wrong, be relative to the inputs. If the function casts to a fixed dtype its
    rounding does not vanish, and if it fails to run in wider dtypes none can be seen to: the change alone decides.
    """
    case, off = report.case, ROUNDINGS_OFF * UNIT_ROUNDOFF[COARSER[report.case.dtype]]
    wider = [case.replace(dtype=dtype) for dtype in WIDER if UNIT_ROUNDOFF[dtype] < UNIT_ROUNDOFF[case.dtype]]
    reports = [other for other in cases.reports(scheme, wider or [case]) if other.failure is None]
    if any(label not in other.notes for other in reports):
        tensor = next(tensor for tensor in report.tensors if tensor.label == label)
        is_erratic = _is_erratic(scheme, case, label, off)
        if is_erratic or (is_erratic is False and beyond_budget(tensor, tensor.got).mean() < FEW):
            return is_erratic
        return _scales_as_rounding(scheme, report, label)
    wide = reports[0].case if reports else case
    larger = [cases.larger(scheme, wide, seed, values=seed == 1) for seed in (1, 2)]
    answers = (_is_erratic(scheme, other, label, off) for other in (*larger, wide) if other is not None)
    return next((answer for answer in answers if answer is not None), False if reports else None)


def _scales_as_rounding(scheme: Declared, report: Report, label: str) -> bool:
    """Whether inputs of LARGER times the size have about the same error, relative to the rounding there.

    Rounding is relative: an error that stays as it is, or grows faster, is another. True if no run can tell.
    """
    case, program, arrays = report.case, Program.of(scheme), {}
    for arg in scheme.inputs:
        full = program.full_array(arg, case)
        arrays[arg.name] = full if arg.is_integer else full * LARGER
    if any(np.abs(x[np.isfinite(x)]).max(initial=0.0) > max_finite(case.dtype) for x in arrays.values()):
        return True
    # If operations may round too, a budget does not vanish where the derivatives cancel.
    rounded = replace(scheme, roundings=scheme.roundings + 1)
    same, larger = (verify_case(rounded, case, arrays=each) for each in (None, arrays))
    if larger.failure is not None:
        return True
    tensors = [next(tensor for tensor in r.tensors if tensor.label == label) for r in (same, larger)]
    before, after = map(_typical_error, tensors)
    return after == 0.0 or not np.isfinite(before + after) or 1 / SPREAD <= after / before <= SPREAD


def _typical_error(tensor: TensorComparison) -> float:
    """The root mean square of the errors, each in parts of its budget."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        errors = (tensor.got - tensor.want) / tensor.element_budgets
    finite = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _is_erratic(scheme: Declared, case: CaseSpec, label: str, off: float) -> bool | None:
    """Whether a slight change of inputs changes the error completely.

    A few elements may hold most of it, and keep their signs by chance: so several changes are tried.
    None without an error, or with too few elements to tell.
    """
    report = next(cases.reports(scheme, [case]), None)
    if report is None or report.failure is not None or label not in report.notes:
        return None
    answers = (_is_other_error(scheme, report, label, off, move) for move in range(MOVES))
    is_other = next(answers)
    return is_other if is_other is not False else any(answers)


def _is_other_error(scheme: Declared, report: Report, label: str, off: float, move: int) -> bool | None:
    """Whether one slight change of the inputs changes the error completely; None with too few elements to tell."""
    case, program, moved = report.case, Program.of(scheme), {}
    for arg in scheme.inputs:
        full = program.full_array(arg, case)
        signs = inputs.generator(case, f"off {arg.name} {move}").choice((-1.0, 1.0), size=full.shape)
        moved[arg.name] = full if arg.is_integer else inputs.rounded(full * (1 + off * signs), case.dtype)
    other = verify_case(scheme, case, arrays=moved)
    if other.failure is not None:
        return None
    tensors = [next(tensor for tensor in r.tensors if tensor.label == label) for r in (report, other)]
    with np.errstate(invalid="ignore"):  # of one copy: two different copies may err in opposite directions
        first, second = (tensor.stitched.copies[tensors[0].copy] - tensor.want for tensor in tensors)
    finite = np.isfinite(first) & np.isfinite(second)
    first, second = first[finite], second[finite]
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    if first.size < MIN_ELEMENTS:
        return None
    return size == 0.0 or float(first @ second) < 0.5 * size
