"""From the evidence on one wrong tensor to notes on the kind of mistake, best explanation first.

A pure function. A clue names a numerical cause (a factor, a constant, a sum, an order, a precision) only if it fits the
full tensor within the budgets, times the factor or the number of addends. The other clues name the wrong elements,
ranks or copies, or state a fact about the run. Clues that explain more come first: a factor of the full tensor before a
wrong region in it. Experiments on other cases then drop the notes that they refute (`experiments.notes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from shardproof.explain import arithmetic, places, sums
from shardproof.explain.evidence import Evidence
from shardproof.explain.note import ACROSS_SIZES, CONTEXT, Note
from shardproof.judge.reference import UNIT_ROUNDOFF

FORWARD_EQUAL = "forward equal, gradient not"


def explain(evidence: Evidence) -> tuple[Note, ...]:
    """Notes on one tensor, best explanation first; empty if nothing is wrong with it."""
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


def _rounded_elements(evidence: Evidence) -> Iterator[Note]:
    """Every element is a number of a narrower dtype, and next to the reference's."""
    dtype = evidence.rounded_dtype
    nearby = 0.0 if dtype is None else 2 * UNIT_ROUNDOFF[dtype] * np.abs(evidence.want)
    if dtype is not None and (np.abs(evidence.got - evidence.want) <= nearby).all():
        claim = f"rounded to {dtype}"
        yield Note(f"{claim}: each element is the {dtype} number next to the reference's", ACROSS_SIZES, claim)


def _full_mesh_collective(evidence: Evidence) -> Iterator[Note]:
    if evidence.full_mesh_collective is not None:
        size = math.prod(evidence.axes.values())
        collective = evidence.full_mesh_collective
        text = f"{collective} is over all {size} ranks, which is more than one axis: pass group=mesh[axis]"
        yield Note(text, CONTEXT, sites=(collective,))


def _first_divergence(evidence: Evidence) -> Iterator[Note]:
    if evidence.first_divergence is not None:
        text = f"first diverging collective: {evidence.first_divergence}"
        yield Note(text, CONTEXT, sites=evidence.first_divergence.sites)


# `extra_roundings` is early: an error that a larger `roundings` would allow may be intended. `narrow_sums` comes before
# `fitted_change` and `wrong_region`, because rounding errors may be near a fitted number, or in one region, by chance.
CLUES = (
    _narrow_result,
    _not_written,
    places.non_finite_elements,
    _rounded_elements,
    arithmetic.extra_roundings,
    arithmetic.named_change,
    arithmetic.elements_that_count,
    sums.missing_or_repeated_sum,
    arithmetic.miscounted_input,
    places.wrong_offset,
    places.another_order,
    sums.misplaced_terms,
    arithmetic.narrow_sums,
    arithmetic.fitted_change,
    sums.unequal_copies,
    places.wrong_region,
    places.changed_elements,
    sums.zero_addend,
    _right_forward,
    _full_mesh_collective,
    _first_divergence,
)
