"""A case is undecided if the reference is discontinuous within the rounding of its inputs: no single value is right.

A budget is a first-order estimate. If rounding changes which expert a token goes to, which of two equal numbers is the
maximum, the order of a sort, or how close a divisor comes to 0, results differ by far more than any derivative
predicts, and both are right. So before a mismatch is reported, the reference is evaluated again at neighbours of the
case, with finite steps. The case is undecided if every wrong element lies within the range of the reference's values
there, each with its budget there; an element that the reference never comes near is wrong, however the reference jumps.

A scheme with `ties="ordered"` has no undecided case: it promises which of equal inputs comes first, and compares inputs
alone, which are exact.

Gradients also depend on conventions: libraries differ in the gradient they return where none exists, as for a root at
0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.draws import EXTREME
from shardproof.engines.program import Program
from shardproof.experiments.neighbours import (
    Neighbour,
    distinct,
    has_equal_infinities,
    neighbours,
)
from shardproof.judge import compare
from shardproof.judge.reference import Reference, evaluate, operation_unit
from shardproof.report.report import Report, drawn_kinds, how_to_avoid
from shardproof.verify_one_case import verify_case

MIN_NEIGHBOURS = 4  # if the reference jumps at none of them, the case is a mismatch
NEIGHBOURS = 40  # and so it is if this many in turn explain no further element
FEW_INTEGERS = 3  # of an element at all neighbours: they are choices, as of positions, and no range
TIE = "tied inputs have no defined order or gradient; the example passes without ties"
NO_FINITE_GRADIENT = "the reference has no finite gradient at these inputs, and libraries return different values there"
CHOICE = "the reference moves as far within the rounding of its inputs"


def verify_or_undecided(scheme: Declared, case: CaseSpec) -> Report:
    """The report of `verify_case`; after a failure, `mark_undecided` decides whether it is undecided."""
    report = verify_case(scheme, case)
    return report if report.ok else mark_undecided(scheme, report)


def mark_undecided(scheme: Declared, report: Report) -> Report:
    """The report, marked undecided if the reference jumps as far as every wrong element and nothing else is wrong."""
    wrong = [tensor for tensor in report.tensors if not tensor.ok]
    if scheme.ties == "ordered":
        return report
    if report.failure is not None or report.protocol or report.cost or report.hygiene or not wrong:
        return report
    if not _jumps_as_far(scheme, report.case, wrong):
        return report
    return replace(
        report, is_undecided=True, undecided_reason=_reason(scheme, report.case, wrong), undecided_examples=1, notes={}
    )


def _reason(scheme: Declared, case: CaseSpec, wrong: Sequence[compare.TensorComparison]) -> str:
    if _is_tie(scheme, case):
        return TIE
    if not all(map(_has_no_finite_gradient, wrong)):
        return CHOICE
    extreme = drawn_kinds(case, EXTREME)
    return f"{NO_FINITE_GRADIENT}; {how_to_avoid(extreme)}" if extreme else NO_FINITE_GRADIENT


def _is_tie(scheme: Declared, case: CaseSpec) -> bool:
    """Whether equal numbers were drawn, and all is right once they are distinct."""
    program = Program.of(scheme)
    # Before rounding: some of many distinct numbers become equal in the tested dtype.
    unrounded = replace(case, dtype="float64")
    drawn = [program.full_array(arg, unrounded) for arg in scheme.inputs if not arg.is_integer]
    if all(np.unique(x).size == x.size for x in drawn):
        return False
    full = {arg.name: (arg, program.full_array(arg, case)) for arg in scheme.inputs}
    distinct_values = {name: x if arg.is_integer else distinct(x, case) for name, (arg, x) in full.items()}
    return verify_case(scheme, case, arrays=distinct_values).ok


def _has_no_finite_gradient(tensor: compare.TensorComparison) -> bool:
    """Whether it is a gradient, and the reference is not finite at any wrong element."""
    return tensor.role == "gradient" and not np.isfinite(tensor.want[compare.wrong_elements(tensor)]).any()


def _jumps_as_far(scheme: Declared, case: CaseSpec, tensors: Sequence[compare.TensorComparison]) -> bool:
    """Whether each wrong element of these tensors lies within the range of the reference's values at neighbours."""
    ranges = [_Range(tensor, scheme, case) for tensor in tensors]
    if _is_explained(ranges, scheme, case, neighbours(scheme, case)):
        return True
    # Moving an infinity is not rounding: among equal infinities only the gradient is a matter of convention.
    of_gradients = [each for each in ranges if each.tensor.role == "gradient"]
    is_gradient = not any(each.unexplained().any() for each in ranges if each not in of_gradients)
    if is_gradient and has_equal_infinities(scheme, case):
        return _is_explained(of_gradients, scheme, case, neighbours(scheme, case, infinities=True))
    return _jumps_if_stored(scheme, case, tensors)


def _jumps_if_stored(scheme: Declared, case: CaseSpec, tensors: Sequence[compare.TensorComparison]) -> bool:
    """Whether each wrong element lies within the range of a reference whose operations round to the tested dtype.

    If such roundings explain an element without a jump, it is a mismatch: the scheme does not declare them.
    """
    stored = replace(scheme, roundings=2)
    if scheme.roundings > 1 or scheme.sums or operation_unit(stored, case) == operation_unit(scheme, case):
        return False
    reference = evaluate(stored, Program.of(stored), case)
    for tensor in (each for each in tensors if not each.argument.is_integer):  # an integer is not rounded
        values, spread = _values_and_spread(reference, tensor)
        budgets = compare.element_budgets_at(stored, case, tensor, values, spread)
        if (compare.wrong_elements(tensor) & ~compare.wrong_elements(replace(tensor, element_budgets=budgets))).any():
            return False
    ranges = [_Range(tensor, scheme, case) for tensor in tensors]
    return _is_explained(ranges, stored, case, neighbours(stored, case))


def _is_explained(
    ranges: Sequence[_Range], scheme: Declared, case: CaseSpec, case_neighbours: Iterable[Neighbour]
) -> bool:
    # If intermediates are rounded to the tested dtype, a jump is met by chance, and more neighbours are needed.
    enough = MIN_NEIGHBOURS if scheme.roundings <= 1 else NEIGHBOURS
    fewest, last = sum(int(each.wrong.sum()) for each in ranges), 0
    for count, neighbour in enumerate(case_neighbours, start=1):
        reference = neighbour.reference(scheme, case)
        for each in ranges:
            each.include(reference, neighbour.is_near)
        unexplained = sum(int(each.unexplained().sum()) for each in ranges)
        if not unexplained:
            return True
        if unexplained < fewest:  # of many equal numbers each neighbour takes another for the largest
            fewest, last = unexplained, count
        if count - last >= (NEIGHBOURS if last or any(each.jumps for each in ranges) else enough):
            return False
    return False


def _values_and_spread(reference: Reference, tensor: compare.TensorComparison) -> tuple[np.ndarray, np.ndarray]:
    """A reference's values of this tensor, and how far rounding moves them."""
    of_role = (reference.outputs, reference.output_spread)
    if tensor.role == "gradient":
        of_role = (reference.gradients, reference.gradient_spread)
    values, spread = (np.asarray(each.get(tensor.name, 0.0)) for each in of_role)
    return values, spread


class _Range:
    """The range of the reference's values for one tensor, element by element, with their budgets."""

    def __init__(self, tensor: compare.TensorComparison, scheme: Declared, case: CaseSpec) -> None:
        self.tensor, self._scheme, self._case = tensor, scheme, case
        self.wrong = compare.wrong_elements(tensor)
        self._lowest, self._highest = np.full(tensor.want.shape, np.inf), np.full(tensor.want.shape, -np.inf)
        self._not_finite = {value: np.zeros(tensor.want.shape, bool) for value in (np.nan, np.inf, -np.inf)}
        self._integers: list[np.ndarray] = []  # of each reference
        self._extend(tensor.want, tensor.element_budgets)
        self._no_finite_gradient = ~np.isfinite(tensor.want) & (tensor.role == "gradient")
        self.jumps = False  # at some neighbour, further than any budget

    def include(self, reference: Reference, is_near: bool) -> None:
        """Extend the range by the values of another reference; a near one uses its own budget."""
        values, spread = _values_and_spread(reference, self.tensor)
        budgets = self.tensor.element_budgets
        if is_near and not self.tensor.argument.is_integer:
            budgets = compare.element_budgets_at(self._scheme, self._case, self.tensor, values, spread)
        with np.errstate(invalid="ignore"):
            self.jumps |= bool((np.abs(values - self.tensor.want.astype(np.float64)) > budgets).any())
        self._extend(values, budgets)

    def _extend(self, values: np.ndarray, budgets: np.ndarray) -> None:
        values = values.astype(np.float64)  # also for an integer or boolean output
        finite = np.isfinite(values)
        with np.errstate(invalid="ignore"):  # an infinity less an infinite budget, which is not kept
            self._lowest = np.where(finite, np.minimum(self._lowest, values - budgets), self._lowest)
            self._highest = np.where(finite, np.maximum(self._highest, values + budgets), self._highest)
        for value, mask in self._not_finite.items():
            mask |= compare.same_number(values, value)
        if self.tensor.argument.is_integer:
            self._integers.append(values)

    def unexplained(self) -> np.ndarray:
        """The wrong elements with a copy outside these values, or without a gradient.

        If the reference has no finite gradient, any non-finite value is accepted.
        """
        unexplained = (
            np.zeros(self.wrong.shape, bool) if self.tensor.gradient_is_none is None else self.tensor.gradient_is_none
        )
        for copy in self.tensor.stitched.copies:
            is_new = self._is_new(copy)
            unexplained = unexplained | np.where(
                np.isfinite(copy), self._is_outside(copy) | self._is_between(copy), is_new
            )
        return self.wrong & unexplained

    def _is_outside(self, copy: np.ndarray) -> np.ndarray:
        return (copy > self._highest) | (copy < self._lowest)

    def _is_between(self, copy: np.ndarray) -> np.ndarray | bool:
        """Where an integer is none of the reference's, which are few: between two positions of a maximum there is none.

        A count of tied rows may have any number in the range.
        """
        if not self._integers:
            return False
        met = np.sort(np.stack(self._integers), axis=0)
        are_few = 1 + (np.diff(met, axis=0) > 0).sum(axis=0) <= FEW_INTEGERS
        return are_few & ~(met == copy).any(axis=0)

    def _is_new(self, copy: np.ndarray) -> np.ndarray:
        """Where a non-finite value appears in no reference, and no reference overflows the dtype there."""
        limit = compare.max_finite(self.tensor.dtype)
        is_expected = (np.isposinf(copy) & (self._highest > limit)) | (np.isneginf(copy) & (self._lowest < -limit))
        for value, mask in self._not_finite.items():
            is_expected = is_expected | (mask & compare.same_number(copy, value))
        return ~(is_expected | self._no_finite_gradient)
