"""Outcomes of mutants in drawn cases and in tests, from a journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants.judged import why_equivalent
from parity_tests.evidence.mutants.mutant import Mutant


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant: the scheme that catches it and its oracle, or else the test."""

    mutant: Mutant
    schemes: int
    examples: int
    drawn: str | None
    oracle: str | None
    tests: str | None
    capped: bool = False  # it survives because the time for its tests was over
    is_tested: bool = True  # False where drawn cases missed it and no tests were run

    @property
    def equivalent(self) -> str | None:
        """The reason why the mutant is equivalent, if one is known; a caught mutant has none."""
        return None if self.drawn or self.tests else why_equivalent(self.mutant)


def without_cases(journal: Journal, sample: Sequence[Mutant]) -> list[Mutant]:
    """The mutants that no drawn cases have been tried on."""
    return [mutant for mutant in sample if "drawn" not in journal.of(mutant.key)]


def without_tests(journal: Journal, sample: Sequence[Mutant]) -> list[Mutant]:
    """The mutants that drawn cases have not caught, and that no tests have been tried on."""
    records = ((mutant, journal.of(mutant.key)) for mutant in sample)
    return [mutant for mutant, record in records if not record.get("drawn") and "tests" not in record]


def outcomes(journal: Journal, sample: Sequence[Mutant]) -> list[Outcome]:
    """The outcomes of the mutants that drawn cases were tried on."""
    records = ((mutant, journal.of(mutant.key)) for mutant in sample)
    return [_outcome(mutant, record) for mutant, record in records if "drawn" in record]


def _outcome(mutant: Mutant, record: dict[str, Any]) -> Outcome:
    case_fields = (record["schemes"], record["examples"], record["drawn"], record["oracle"])
    is_tested = bool(record["drawn"]) or "tests" in record
    return Outcome(mutant, *case_fields, record.get("tests"), record.get("capped", False), is_tested)
