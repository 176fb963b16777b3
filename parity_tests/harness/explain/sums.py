"""Clues in what each rank returned: a sum is missing or repeated, copies differ, a gradient is None."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parity_tests.harness.explain.evidence import Evidence
from parity_tests.harness.explain.note import ACROSS_MESHES, ACROSS_SIZES, CONTEXT, Note


def sums(evidence: Evidence) -> Iterator[Note]:
    """The copies add up to what each should be, or the addends of a sum are already what only their sum should be."""
    for axis, pieces in _shared(evidence):
        if axis not in evidence.at:
            if all(_is_right(evidence, piece) for piece in pieces):
                often = f"{evidence.role} summed over {axis} once too often"
                yield Note(f"{often}: each rank already has the reference{evidence.thin}", ACROSS_MESHES, often)
        elif _adds_up(evidence, pieces):
            missing = f"{evidence.role} missing a sum over {axis}"
            what = f"the ranks' {evidence.role}s add up to the reference"
            yield Note(f"{missing}: {what}{evidence.thin}", ACROSS_MESHES, missing)


def copies(evidence: Evidence) -> Iterator[Note]:
    """Ranks that should hold the same value and do not; copies that add up are reported by `sums`."""
    for axis, pieces in _shared(evidence):
        if axis not in evidence.at or _adds_up(evidence, pieces):
            continue
        wrong = [rank for rank, piece in enumerate(pieces) if not _is_right(evidence, piece)]
        if 0 < len(wrong) < len(pieces):
            ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
            text = f"wrong only on {axis} {ranks}"
            yield Note(f"{text}: the copies of the other ranks are right", ACROSS_SIZES, text)
        elif any(evidence.differs(pieces[0], got=piece).any() for piece in pieces[1:]):
            yield Note(f"{axis} ranks hold different copies of what should be one value", CONTEXT)


def silent(evidence: Evidence) -> Iterator[Note]:
    """Of the ranks whose addends are summed, one contributed only zeros."""
    for axis, pieces in _shared(evidence):
        nothing = [rank for rank, piece in enumerate(pieces) if not piece.any()]
        if axis not in evidence.at and len(nothing) == 1:
            text = f"{axis} rank {nothing[0]} gave only zeros to the sum"
            yield Note(text, ACROSS_SIZES, text)


def _shared(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    return ((axis, pieces) for axis, pieces in evidence.pieces.items() if len(pieces) > 1)


def _is_right(evidence: Evidence, piece: np.ndarray) -> bool:
    return not evidence.differs(evidence.want, got=piece).any()


def _adds_up(evidence: Evidence, pieces: np.ndarray) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        total = pieces.sum(axis=0)
    # n terms, each within its budget, add up to n budgets.
    return not evidence.differs(evidence.want, len(pieces), got=total).any()


def absent(evidence: Evidence) -> Iterator[Note]:
    """None came back, on every rank or on some ranks of an axis; also where zeros would have been near enough."""
    missing = evidence.absent
    if missing is None or not evidence.lacks_gradient.any():
        return
    if missing.all():
        yield Note("no gradient was returned (None): backward does not reach this input")
    else:
        yield Note(f"no gradient was returned (None){_by(evidence, missing)}: backward does not reach this input there")
    if not evidence.is_wrong.any():
        hint = "the reference's is not zero, although too small for its budget"
        yield Note(f"{hint}: return zeros, or let backward reach it")


def _by(evidence: Evidence, missing: np.ndarray) -> str:
    """The ranks of the axis that holds just what is missing, where one does."""
    for axis, owner in evidence.owners.items():
        ranks = np.unique(owner[missing])
        if missing[np.isin(owner, ranks)].all():
            return f" by {axis} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return ""
