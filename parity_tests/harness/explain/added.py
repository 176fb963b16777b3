"""The clue of an input that is added as a whole: a bias that each rank adds before the sum, or that nobody adds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity_tests.harness.explain.arithmetic import known_number
from parity_tests.harness.explain.evidence import Evidence


def added(evidence: Evidence) -> Iterator[str]:
    """What came is what should have, and an input some times more, or less by the input; a named number says more."""
    if any(known_number(evidence)):
        return
    for name, x in evidence.inputs.items():
        if not x.any():
            continue
        for times, sentence in _tried(evidence, name):
            with np.errstate(invalid="ignore", over="ignore"):
                expected = evidence.want + times * x
            if evidence.fits(expected):
                yield sentence + evidence.thin
                return


def _tried(evidence: Evidence, name: str) -> Iterator[tuple[int, str]]:
    for axis, ranks in evidence.axes.items():
        if ranks > 1:
            yield ranks - 1, f"{name} is counted {ranks} times (= {axis}): each rank adds it before the sum"
    yield 1, f"{name} is added once too often"
    yield -1, f"{name} is left out"
