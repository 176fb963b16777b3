"""Check that equal reports compared something: an output is not empty, and each tensor has numbers above its budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.draws import has_infinities
from shardproof.judge.reference import UNIT_ROUNDOFF, accumulator_roundoff
from shardproof.report.report import Report, sizes


class NothingCompared(ValueError):
    """No example compared a tensor: it was empty or below its budget, or its reference had no finite number."""


def has_compared(scheme: Declared, reports: Sequence[Report]) -> bool:
    """Whether the reports that are equal, if any are, compared something of each tensor."""
    equal = [report for report in reports if report.ok or report.only_unwaited]
    try:
        if equal:
            check_compared(scheme, equal)
        return True
    except NothingCompared:
        return False


def check_compared(scheme: Declared, reports: Sequence[Report]) -> None:
    """Errors: NothingCompared if all outputs are empty, or a tensor has no finite number, is undefined or below budget.

    A result of NaN passes where the reference is NaN, and an infinity where it is that infinity.
    """
    check_not_empty(scheme, reports)
    compared: set[str] = set()
    without: dict[str, list[tuple[np.ndarray, CaseSpec]]] = {}  # references of tensors with nothing to compare
    for report in reports:
        for tensor in report.tensors:
            if (np.isfinite(tensor.element_budgets) & np.isfinite(tensor.want)).any():
                compared.add(tensor.label)
            elif tensor.want.size:
                without.setdefault(tensor.label, []).append((tensor.want, report.case))
    for label in [each for each in without if each not in compared]:
        wants, cases = zip(*without[label], strict=True)
        why = f"{label} depends on NaN in an output"
        if not any(np.isfinite(want).any() for want in wants):
            is_nan = all(np.isnan(want).all() for want in wants)
            why = f"the reference of {label} is {'NaN' if is_nan else 'infinite or NaN'}"
        are_drawn = all(any(map(has_infinities, case.values.values())) for case in cases)
        remedy = "correct the reference, or draw values that it is defined for"
        raise NothingCompared(
            f"scheme '{scheme.name}': {why} everywhere at {sizes(cases[0])}; nothing of it was compared: "
            f"{'infinities or NaN were drawn, give more examples' if are_drawn else remedy}"
        )
    _check_power(scheme, reports)


def check_not_empty(scheme: Declared, reports: Sequence[Report]) -> None:
    """NothingCompared if all outputs are empty: their gradients are zeros, whatever the function computes."""
    outputs = [tensor for report in reports for tensor in report.tensors if tensor.role == "output"]
    if not any(tensor.want.size for tensor in outputs):
        raise NothingCompared(
            f"scheme '{scheme.name}': every output is empty at {sizes(reports[-1].case)}; nothing was compared"
        )


def _check_power(scheme: Declared, reports: Sequence[Report]) -> None:
    """NothingCompared if all values of an output, or of all gradients, are smaller than their budgets.

    Zeros would then be accepted too. A value that is 0 up to the float64 rounding of the reference is an exception: its
    zeros are right. A single gradient may be below its budget in a few examples, as in a deep model with large inputs.
    """
    largest: dict[str, tuple[str, str]] = {}  # by label: the group that it is judged in, and its budget
    powerful: set[str] = set()
    for report in reports:
        rounding = UNIT_ROUNDOFF["float64"] / accumulator_roundoff(report.case.dtype)  # of a budget in float32
        for tensor in report.tensors:
            size, budget = np.abs(tensor.want), tensor.element_budgets
            judged_with = tensor.label if tensor.role == "output" else "gradients"
            if not (np.isfinite(size) & np.isfinite(budget) & (size <= budget)).all():
                powerful.add(judged_with)
            elif size.size and size.max() > rounding * budget.max():
                largest[tensor.label] = judged_with, f"{budget.max():.1e} for values up to {size.max():.1e}"
    for label, (judged_with, budget_and_values) in largest.items():
        if judged_with not in powerful:
            raise NothingCompared(
                f"scheme '{scheme.name}': the budget of {label} is {budget_and_values}, and never below a value: "
                "zeros would be accepted too; write the reference without large numbers that cancel"
            )
