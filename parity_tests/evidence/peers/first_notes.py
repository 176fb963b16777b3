"""`python -m parity_tests.evidence.peers.first_notes`: of the mismatches of the gallery, the share of true first notes.

The rule is the same as for injected bugs: a finding has the lines that are wrong and the kind of a bug that makes the
same mistake, and a note is false where they do not go together. A first note is about the smallest failing case, after
experiments.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from collections import Counter
from pathlib import Path

import typer

from parity_tests.evidence.injected_bugs.first_notes import FALSE, NOTHING, TRUE, truth
from parity_tests.evidence.peers.__main__ import files, version
from parity_tests.evidence.peers.findings import PROJECTS, Finding, expected
from parity_tests.evidence.peers.outcome import identifier, known_mistake
from shardproof.declare.declared import Declared
from shardproof.declare.discover import schemes_of_file
from shardproof.engines.ledger import base
from shardproof.experiments.notes import check_notes

EXAMPLES = 8


def first_note(scheme: Declared) -> str | None:
    """The headline of the report on lockstep; None where it is no mismatch, or has no note."""
    report = check_notes(scheme, known_mistake(scheme, "lockstep", EXAMPLES))
    return next((notes[0] for notes in report.notes.values() if notes), None) if report.verdict == "mismatch" else None


def findings_of(file: Path) -> list[tuple[Declared, Finding]]:
    """The schemes of a file that show a finding."""
    entries = [(scheme, expected(identifier(file, scheme.name))) for scheme in schemes_of_file(str(file))]
    return [(scheme, entry) for scheme, entry in entries if isinstance(entry, Finding)]


def truth_for(finding: Finding, note: str) -> str:
    """Whether a note is true of a finding."""
    return truth(finding.kind, note, [base(line) for line in finding.lines])


def main() -> None:
    """Judge the schemes of every finding with an installed project, and print the notes."""
    counted: Counter[str] = Counter()
    for folder in PROJECTS:
        for file in files(folder) if version(folder) else ():
            for scheme, finding in findings_of(file):
                note = first_note(scheme)
                if note is None:
                    continue
                verdict = truth_for(finding, note)
                counted[verdict] += 1
                print(f"{verdict}: {identifier(file, scheme.name)} ({finding.kind}): {note}", flush=True)
    claims = counted[TRUE] + counted[FALSE]
    print(f"{counted[TRUE]} of {claims} first notes are true, {counted[NOTHING]} claim nothing")


if __name__ == "__main__":
    typer.run(main)
