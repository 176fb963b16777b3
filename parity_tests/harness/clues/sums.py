"""Clues in the ranks' own terms: one is missing or counted twice, or the sum was never, or twice, taken."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity_tests.harness.evidence import Evidence


def terms(evidence: Evidence) -> Iterator[str]:
    """One rank's addend explains the difference."""
    for (axis, rank), term in evidence.addends.items():
        with np.errstate(invalid="ignore", over="ignore"):
            without, twice = evidence.want - term, evidence.want + term
        if evidence.fits(without):
            yield f"one rank's term is missing: {axis} rank {rank}"
        elif evidence.fits(twice):
            yield f"one rank's term is counted twice: {axis} rank {rank}"
        elif evidence.fits(term):
            yield f"only one rank's term is there: {axis} rank {rank}"


def sums(evidence: Evidence) -> Iterator[str]:
    """The ranks' pieces add up to what each should have had, or each has what only their sum should be."""
    for axis, pieces in evidence.pieces.items():
        if len(pieces) < 2:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            total = pieces.sum(axis=0)
        each = [not evidence.differs(evidence.want, got=piece).any() for piece in pieces]
        if not evidence.differs(evidence.got, got=total).any():
            if all(each):
                yield f"{evidence.role} summed over {axis} once too often: each rank already has the reference"
        # n terms, each within its budget, add up to n budgets.
        elif not evidence.differs(evidence.want, len(pieces), got=total).any():
            yield (f"{evidence.role} missing a sum over {axis}: the ranks' {evidence.role}s add up to the reference")


def copies(evidence: Evidence) -> Iterator[str]:
    """Ranks that should hold the same value and do not."""
    for axis, pieces in evidence.pieces.items():
        with np.errstate(invalid="ignore", over="ignore"):
            total = pieces.sum(axis=0)
        if len(pieces) < 2 or not evidence.differs(evidence.got, got=total).any():
            continue
        wrong = [r for r, piece in enumerate(pieces) if evidence.differs(evidence.want, got=piece).any()]
        if 0 < len(wrong) < len(pieces):
            ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
            yield f"wrong only on {axis} {ranks}: the copies of the other ranks are right"
        elif any(evidence.differs(pieces[0], got=piece).any() for piece in pieces[1:]):
            yield f"{axis} ranks hold different copies of what should be one value"
