"""A clue for offsets: in every row one term sits the same number of places away from where it belongs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity_tests.harness.explain.evidence import Evidence

LEAST_ROWS = 2  # one row is displaced by some number always


def displaced(evidence: Evidence) -> Iterator[str]:
    """Pairs of opposite errors at one distance; a row with a single error has lost its term at a border."""
    shape = evidence.want.shape
    if evidence.want.ndim == 0 or shape[-1] < 2 or not np.isfinite(evidence.got[evidence.bad]).all():
        return
    bad = evidence.bad.reshape(-1, shape[-1])
    with np.errstate(invalid="ignore"):
        residual = np.where(evidence.bad, evidence.got - evidence.want, 0.0).reshape(bad.shape)
    slack = evidence.budget.reshape(bad.shape)
    distances = []
    for row in np.flatnonzero(bad.any(axis=1)):
        places = np.flatnonzero(bad[row])
        if len(places) > 2:
            return
        if len(places) == 2:
            if abs(residual[row, places].sum()) > slack[row, places].sum():
                return
            distances.append(int(places[1] - places[0]))
    if len(distances) >= LEAST_ROWS and len(set(distances)) == 1:
        along = evidence.dim(len(shape) - 1)
        places = f"{distances[0]} place{'s' if distances[0] > 1 else ''}"
        yield f"a term sits {places} off along {along}: an offset is wrong by {distances[0]}"
