"""Survivors that were looked at: why each is equivalent, that is, no caller can see the change.

An entry is a mutant's file, symbol and change. An equivalent mutant is listed on the page and not counted.
"""

from __future__ import annotations

from parity_tests.mutants.mutant import Mutant

EQUIVALENT: dict[tuple[str, str, str], str] = {}


def why_equivalent(mutant: Mutant) -> str | None:
    """Why nobody can see it; None for a mutant that was not judged so."""
    return EQUIVALENT.get((mutant.file, mutant.symbol, mutant.change))
