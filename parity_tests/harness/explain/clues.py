"""What kind of mistake: from the evidence on one failing tensor to sentences, the best explanation first.

A pure function. Each clue claims a pattern only if the full tensor fits it within its budget. Clues that explain more
come first: a factor of the whole tensor before a wrong place in it. Experiments on other cases then drop what they
refute (`experiments.notes`).
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
    missing = tuple(sums.absent(evidence))
    if not evidence.is_wrong.any():
        return missing
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # results may overflow
        notes = [sentence for clue in CLUES for sentence in clue(evidence)]
    return (*missing, *notes) or (places.worst(evidence),)


def _backward(evidence: Evidence) -> Iterator[Note]:
    if evidence.role == "gradient" and evidence.outputs_pass:
        yield Note(FORWARD_EQUAL, CONTEXT)


def _narrow_result(evidence: Evidence) -> Iterator[Note]:
    if evidence.role == "output" and evidence.narrow_dtype is not None:
        yield Note(f"returned in {evidence.narrow_dtype}, which rounds more than the dtype of the inputs")


def _over_all(evidence: Evidence) -> Iterator[Note]:
    if evidence.over_all is not None:
        size = math.prod(evidence.axes.values())
        text = f"{evidence.over_all} is over all {size} ranks, which is no one axis: pass group=mesh[axis]"
        yield Note(text, CONTEXT, sites=(evidence.over_all,))


def _divergence(evidence: Evidence) -> Iterator[Note]:
    if evidence.first_divergence is not None:
        text = f"first diverging collective: {evidence.first_divergence}"
        yield Note(text, CONTEXT, sites=evidence.first_divergence.sites)


# `stored` is early: what more declared roundings would cover may be meant. `narrow_sums` comes before `fitted_number`
# and `narrowest`, since rounding errors may by chance lie near a fitted number, or in one place only.
CLUES = (
    _narrow_result,
    places.not_finite,
    arithmetic.stored,
    arithmetic.known_number,
    sums.sums,
    arithmetic.added,
    places.displaced,
    places.another_order,
    arithmetic.narrow_sums,
    arithmetic.fitted_number,
    sums.copies,
    places.narrowest,
    sums.silent,
    _backward,
    _over_all,
    _divergence,
)
