"""Clues in the size of the error: sums kept too narrow, or more roundings to the tested dtype than were declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parity_tests.harness.explain.evidence import Evidence

STORED = "within what "


def stored(evidence: Evidence) -> Iterator[str]:
    """The error is what some more intermediates in the tested dtype would bring."""
    for count, budget in sorted(evidence.stored_budgets.items()):
        if replace(evidence, budget=budget).wrong == 0:
            yield f"{STORED}{count} roundings to {evidence.dtype} may do: declare roundings={count} if they are meant"
            return


def narrow_sums(evidence: Evidence) -> Iterator[str]:
    """The error is what sums in a coarser dtype would bring."""
    if evidence.loose_budget is not None and replace(evidence, budget=evidence.loose_budget).wrong == 0:
        yield f"{STORED}{evidence.dtype} accumulation may do{evidence.thin if evidence.got.size == 1 else ''}"
