"""Outcomes by mutant in a JSON Lines file: what stands there is not judged again, so a run may be stopped any time."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_tests.evidence.mutants.judged import why_equivalent
from parity_tests.evidence.mutants.mutant import Mutant


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the scheme that catches it and its oracle, or else the test."""

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
        """Why it is equivalent, if that is known; what was caught is not."""
        return None if self.drawn or self.tests else why_equivalent(self.mutant)


class Journal:
    """Records by a mutant's key, as they come from any thread."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        self.records: dict[str, dict[str, Any]] = {}
        for line in lines:
            record = json.loads(line)
            self.records[record["key"]] = self.records.get(record["key"], {}) | record

    def of(self, mutant: Mutant) -> dict[str, Any]:
        """What is known of a mutant."""
        return self.records.get(mutant.key, {})

    def add(self, record: dict[str, Any]) -> None:
        """One more line, which amends those before it of the same mutant."""
        with self._lock:
            self.records[record["key"]] = self.records.get(record["key"], {}) | record
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def lacks_cases(self, sample: Sequence[Mutant]) -> list[Mutant]:
        """The mutants that no drawn cases have been tried on."""
        return [mutant for mutant in sample if "drawn" not in self.of(mutant)]

    def lacks_tests(self, sample: Sequence[Mutant]) -> list[Mutant]:
        """The mutants that drawn cases have not caught, and that no tests have been tried on."""
        return [mutant for mutant in sample if not self.of(mutant).get("drawn") and "tests" not in self.of(mutant)]

    def outcomes(self, sample: Sequence[Mutant]) -> list[Outcome]:
        """Of the mutants that drawn cases were tried on."""
        lacking = {mutant.key for mutant in self.lacks_cases(sample)}
        return [_outcome(mutant, self.of(mutant)) for mutant in sample if mutant.key not in lacking]


def _outcome(mutant: Mutant, record: dict[str, Any]) -> Outcome:
    of_cases = (record["schemes"], record["examples"], record["drawn"], record["oracle"])
    is_tested = bool(record["drawn"]) or "tests" in record
    return Outcome(mutant, *of_cases, record.get("tests"), record.get("capped", False), is_tested)
