"""A clue that is known, not found: a rank returned no gradient at all where the reference's is not zero."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity_tests.harness.explain.evidence import Evidence


def absent(evidence: Evidence) -> Iterator[str]:
    """None came back, on every rank or on some ranks of an axis; also where zeros would have been near enough."""
    missing = evidence.absent
    if missing is None or not evidence.lacks_gradient.any():
        return
    if missing.all():
        yield "no gradient was returned (None): backward does not reach this input"
    else:
        yield f"no gradient was returned (None){_by(evidence, missing)}: backward does not reach this input there"
    if not evidence.bad.any():
        least = "the reference's is not zero, although too small for its budget"
        yield f"{least}: return zeros, or let backward reach it"


def _by(evidence: Evidence, missing: np.ndarray) -> str:
    """The ranks of the axis that holds just what is missing, where one does."""
    for axis, owner in evidence.owners.items():
        ranks = np.unique(owner[missing])
        if missing[np.isin(owner, ranks)].all():
            return f" by {axis} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return ""
