"""Survivors that were looked at: why each is equivalent, that is, no caller can see the change.

An entry is a mutant's file, symbol and change. An equivalent mutant is listed on the page and not counted.
"""

from __future__ import annotations

from parity_tests.mutants.mutant import Mutant

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("torch_impl/layouts/token_layout.py", "_build", "True -> False"): (
        "copy=True: the offsets that it copies are never the caller's, but read from the host or written by a where"
    ),
    ("torch_impl/parallelizer/communication_counts.py", "style_counts", "0 -> 1"): (
        "an embedding has no width of inputs: what is counted of it stands in no layout of an embedding"
    ),
}


def why_equivalent(mutant: Mutant) -> str | None:
    """Why nobody can see it; None for a mutant that was not judged so."""
    return EQUIVALENT.get((mutant.file, mutant.symbol, mutant.change))
