"""What kind of mistake: from the evidence on one wrong tensor to notes, the best explanation first.

A pure function. A clue that gives the numbers a cause (a factor, a constant, a sum, an order, a precision) does so only
if the full tensor fits it within its budget, times the factor or the number of addends. The others say which elements,
ranks or copies are wrong, or state a fact of the run. Clues that explain more come first: a factor of the full tensor
before a wrong place in it. Experiments on other cases then drop the notes that they refute (`experiments.notes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from parity_tests.harness.explain import arithmetic, places, sums
from parity_tests.harness.explain.evidence import Evidence
from parity_tests.harness.explain.note import CONTEXT, Note

FORWARD_EQUAL = "forward equal, gradient not"


def explain(evidence: Evidence) -> tuple[Note, ...]:
    """Notes on one tensor, the best explanation first; none if nothing is wrong with it."""
    missing = tuple(sums.missing_gradient(evidence))
    if not evidence.is_wrong.any():
        return missing
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # results may overflow
        notes = [note for clue in CLUES for note in clue(evidence)]
    return (*missing, *notes) or (places.worst_element(evidence),)


def _not_written(evidence: Evidence) -> Iterator[Note]:
    if evidence.before is not None and np.array_equal(evidence.got, evidence.before, equal_nan=True):
        yield Note("as it was before the call: nothing is written to it")


def _right_forward(evidence: Evidence) -> Iterator[Note]:
    if evidence.role == "gradient" and evidence.outputs_pass:
        yield Note(FORWARD_EQUAL, CONTEXT)


def _narrow_result(evidence: Evidence) -> Iterator[Note]:
    if evidence.role == "output" and evidence.narrow_dtype is not None:
        yield Note(f"returned in {evidence.narrow_dtype}, which rounds more than the dtype of the inputs")


def _full_mesh_collective(evidence: Evidence) -> Iterator[Note]:
    if evidence.full_mesh_collective is not None:
        size = math.prod(evidence.axes.values())
        text = f"{evidence.full_mesh_collective} is over all {size} ranks, which is no one axis: pass group=mesh[axis]"
        yield Note(text, CONTEXT, sites=(evidence.full_mesh_collective,))


def _first_divergence(evidence: Evidence) -> Iterator[Note]:
    if evidence.first_divergence is not None:
        text = f"first diverging collective: {evidence.first_divergence}"
        yield Note(text, CONTEXT, sites=evidence.first_divergence.sites)


# `extra_roundings` is early: an error that a larger `roundings` allows may be intended. `narrow_sums` comes before
# `fitted_change` and `wrong_region`, since rounding errors may by chance be near a fitted number, or in one place.
CLUES = (
    _narrow_result,
    _not_written,
    places.non_finite_elements,
    arithmetic.extra_roundings,
    arithmetic.named_change,
    sums.missing_or_repeated_sum,
    arithmetic.miscounted_input,
    places.wrong_offset,
    places.another_order,
    arithmetic.narrow_sums,
    arithmetic.fitted_change,
    sums.unequal_copies,
    places.wrong_region,
    sums.zero_addend,
    _right_forward,
    _full_mesh_collective,
    _first_divergence,
)
