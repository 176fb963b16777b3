"""Judge a sample: drawn cases first, batch by batch in fresh processes; what survives them by tests. It can be resumed.

Each outcome is a line of a JSON Lines file. What stands there is not judged again, so a run may be stopped at any time,
and a larger sample of the same seed continues a smaller one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_tests.injected_bugs.injected_bug import ROOT
from parity_tests.mutants.by_tests import first_failing
from parity_tests.mutants.judged import why_equivalent
from parity_tests.mutants.mutant import Mutant
from parity_tests.mutants.places import lines_of_users
from parity_tests.mutants.reached import Memory, Reach, of_tests, test_files

BATCH = 12
STARTED_S = 120.0  # for a process to import what it needs, and for its first mutant besides
TIMEOUT_S = 240.0  # of one mutant and its references
Progress = Callable[[str], Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the scheme that catches it and its oracle, or else the file of tests."""

    mutant: Mutant
    schemes: int
    examples: int
    drawn: str | None
    oracle: str | None
    tests: str | None

    @property
    def equivalent(self) -> str | None:
        """Why it is equivalent, if that is known; what was caught is not."""
        return None if self.drawn or self.tests else why_equivalent(self.mutant)


class Journal:
    """Records by a mutant's key, as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        self.records: dict[str, dict[str, Any]] = {}
        for line in lines:
            record = json.loads(line)
            self.records[record["key"]] = self.records.get(record["key"], {}) | record

    def add(self, record: dict[str, Any]) -> None:
        self.records[record["key"]] = self.records.get(record["key"], {}) | record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def outcomes(self, sample: Sequence[Mutant]) -> list[Outcome]:
        """Of the mutants that are judged completely."""
        records = [(mutant, self.records.get(mutant.key, {})) for mutant in sample]
        return [
            Outcome(
                mutant, record["schemes"], record["examples"], record["drawn"], record["oracle"], record.get("tests")
            )
            for mutant, record in records
            if record.get("drawn") or "tests" in record
        ]


def by_drawn_cases(
    sample: Sequence[Mutant], schemes: Mapping[str, Reach], journal: Journal, examples: int, cache: str, show: Progress
) -> None:
    """Judge those that the journal lacks."""
    left = [mutant for mutant in sample if "drawn" not in journal.records.get(mutant.key, {})]
    while left:
        batch = left[:BATCH]
        show(f"drawn cases: {len(sample) - len(left)} of {len(sample)} mutants, {batch[0].component}")
        judged = [_nearest(mutant, schemes) for mutant in batch]
        for record in _of_batch(list(zip(batch, judged, strict=True)), examples, cache):
            journal.add(record)
        done = {mutant.key for mutant in batch if "drawn" in journal.records.get(mutant.key, {})}
        if batch[0].key not in done:  # it was given all its time, or its process died
            journal.add({"key": batch[0].key, "schemes": len(judged[0]), "examples": 0, "drawn": None, "oracle": None})
        left = [mutant for mutant in left if "drawn" not in journal.records.get(mutant.key, {})]


def by_tests(sample: Sequence[Mutant], memory: Memory, journal: Journal, folders: str, show: Progress) -> None:
    """Judge those that drawn cases have not caught."""
    for number, mutant in enumerate(sample, start=1):
        record = journal.records.get(mutant.key, {})
        if record.get("drawn") or "tests" in record:
            continue
        show(f"tests: mutant {number} of {len(sample)}, {mutant.file} {mutant.symbol}: {mutant.change[:60]}")
        files = [
            file for file in test_files(mutant.component) if folders == "all" or file.parent.name == mutant.component
        ]
        reaches = [(file, reach) for file in files if (reach := of_tests(memory, file, show)).passed]
        reaching = [(file, reach) for file, reach in reaches if reach.reaches(mutant)]
        if not reaching:  # what is evaluated at import may have run before the lines were counted
            users = lines_of_users(mutant)
            reaching = [
                (file, reach) for file, reach in reaches if users.intersection(reach.lines.get(mutant.file, ()))
            ]
        journal.add({"key": mutant.key, "tests": first_failing(mutant, reaching), "files": len(reaching)})


def _nearest(mutant: Mutant, schemes: Mapping[str, Reach]) -> list[str]:
    """Keys of the schemes that run the line, or what uses a line of import; those that run the fewest first."""
    reaching = [key for key, reach in schemes.items() if reach.reaches(mutant)]
    if not reaching:
        users = lines_of_users(mutant)
        reaching = [key for key, reach in schemes.items() if users.intersection(reach.lines.get(mutant.file, ()))]
    return sorted(reaching, key=lambda key: sum(map(len, schemes[key].lines.values())))


def _of_batch(batch: Sequence[tuple[Mutant, list[str]]], examples: int, cache: str) -> Iterator[dict[str, Any]]:
    """Records of a process of its own, as far as it comes: it is ended where one mutant takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batch.json"
        pairs = [(mutant.to_dict(), keys) for mutant, keys in batch]
        file.write_text(json.dumps({"examples": examples, "cache": cache, "mutants": pairs}))
        command = [sys.executable, "-m", "parity_tests.mutants.drawn", str(file)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert process.stdout is not None
        waiting = selectors.DefaultSelector()
        waiting.register(process.stdout, selectors.EVENT_READ)
        try:
            limit = STARTED_S + TIMEOUT_S
            while waiting.select(limit) and (line := process.stdout.readline()):
                yield json.loads(line)
                limit = TIMEOUT_S
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
