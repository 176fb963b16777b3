"""Judge a sample: drawn cases first, batch by batch in fresh processes, then survivors by tests. It can be resumed.

A larger sample of the same seed continues a smaller one.
"""

from __future__ import annotations

import itertools
import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants.by_tests import CAP_S, TestRuns, reaching
from parity_tests.evidence.mutants.judged import why_equivalent
from parity_tests.evidence.mutants.mutant import Mutant
from parity_tests.evidence.mutants.outcomes import without_cases, without_tests
from parity_tests.evidence.mutants.places import lines_of_statement, lines_of_users
from parity_tests.evidence.mutants.reached import CaseReach, Memory, TestReach, of_tests, test_files
from parity_tests.evidence.workers import Workers

BATCH = 24  # mutants of one component, which share references: the more, the nearer they stand
STARTED_S = 120.0  # for a process to import its modules, and for its first mutant besides
TIMEOUT_S = 240.0  # of one mutant and its references
Progress = Callable[[str], Any]
Cases = dict[str, list[int]]  # numbers of drawn cases by the key of their scheme, the nearest scheme first


def by_drawn_cases(
    sample: Sequence[Mutant],
    schemes: Mapping[str, CaseReach],
    journal: Journal,
    examples: int,
    cache: str,
    workers: Workers,
    show: Progress,
) -> None:
    """Judge those that the journal lacks."""

    def judge(batch: Sequence[Mutant]) -> None:
        show(f"drawn cases: {len(sample) - len(without_cases(journal, sample))} of {len(sample)} mutants")
        left = [(mutant, _nearest(mutant, schemes)) for mutant in batch]
        while left:
            for record in _of_batch(left, examples, cache, workers):
                journal.add(record)
            if workers.stopped.is_set():
                return
            (first, cases), *_ = left
            if without_cases(journal, [first]):  # it was given all its time, or its process died
                journal.add({"key": first.key, "schemes": len(cases), "examples": 0, "drawn": None, "oracle": None})
            left = [(mutant, cases) for mutant, cases in left if without_cases(journal, [mutant])]

    left = without_cases(journal, sample)
    workers.each(judge, batches(left, min(BATCH, -(-len(left) // workers.jobs))))


def batches(mutants: Sequence[Mutant], size: int = BATCH) -> list[Sequence[Mutant]]:
    """Mutants of one component in each, neighbours together; the largest components come first."""
    counts = Counter(mutant.component for mutant in mutants)
    ordered = sorted(mutants, key=lambda mutant: (-counts[mutant.component], mutant.file, mutant.start))
    groups = [list(group) for _, group in itertools.groupby(ordered, lambda mutant: mutant.component)]
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]


def by_tests(
    sample: Sequence[Mutant], memory: Memory, journal: Journal, folders: str, workers: Workers, show: Progress
) -> None:
    """Judge mutants that drawn cases have not caught: by tests of their component, then by tests of the others.

    Mutants read as equivalent are left to `equivalents.py`, which tests all of them at once.
    """
    runs, is_all = TestRuns(workers), folders == "all"
    sample = [mutant for mutant in sample if not why_equivalent(mutant)]
    left = without_tests(journal, sample)
    names = {mutant.component for mutant in left}
    tests = of_tests(memory, [file for file in test_files("") if file.parent.name in names], workers, show)

    def judge_by_own(mutant: Mutant) -> None:
        show(f"tests: {len(without_tests(journal, sample))} mutants left, {mutant.file} {mutant.symbol}")
        own = [test for test in tests if test.component == mutant.component]
        _judge(mutant, own, runs, journal, is_last=not is_all)

    workers.each(judge_by_own, left)
    left = without_tests(journal, sample)
    if not left:
        return
    all_tests = of_tests(memory, test_files(""), workers, show)

    def judge_by_others(mutant: Mutant) -> None:
        show(f"tests of other components: {len(without_tests(journal, sample))} mutants left, {mutant.file}")
        _judge(mutant, [test for test in all_tests if test.component != mutant.component], runs, journal, is_last=True)

    workers.each(judge_by_others, left)


def _judge(mutant: Mutant, tests: Sequence[TestReach], runs: TestRuns, journal: Journal, is_last: bool) -> None:
    spent, start = journal.of(mutant.key).get("spent", 0.0), time.monotonic()
    failure = runs.first_failing(mutant, reaching(mutant, tests), CAP_S - spent)
    record = {"key": mutant.key, "spent": round(spent + time.monotonic() - start, 1), "capped": failure.capped}
    is_judged = is_last or failure.test or failure.capped
    if not runs.workers.stopped.is_set():
        journal.add(record | ({"tests": failure.test} if is_judged else {}))


def _nearest(mutant: Mutant, schemes: Mapping[str, CaseReach]) -> Cases:
    """The cases that run the line or a user of its import-time value, of the schemes with the fewest lines first.

    If none does, the cases that run its statement: the interpreter counts no line for some parts of a statement.
    """
    lines = lines_of_users(mutant).union(range(mutant.first_line, mutant.last_line + 1))
    for numbers in (lines, lines_of_statement(mutant)):
        cases = {key: each for key, reach in schemes.items() if (each := reach.cases(mutant.file, numbers))}
        if cases:
            return {key: cases[key] for key in sorted(cases, key=lambda key: schemes[key].width)}
    return {}


def _of_batch(
    batch: Sequence[tuple[Mutant, Cases]], examples: int, cache: str, workers: Workers
) -> Iterator[dict[str, Any]]:
    """Records of a process of its own, as far as it comes: it is ended where one mutant takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batch.json"
        pairs = [(mutant.to_dict(), cases) for mutant, cases in batch]
        file.write_text(json.dumps({"examples": examples, "cache": cache, "mutants": pairs}))
        command = [sys.executable, "-m", "parity_tests.evidence.mutants.drawn", str(file)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with workers.process(command, **pipes) as process:
            assert process.stdout is not None
            waiting = selectors.DefaultSelector()
            waiting.register(process.stdout, selectors.EVENT_READ)
            limit = STARTED_S + TIMEOUT_S
            while waiting.select(limit) and (line := process.stdout.readline()):
                yield json.loads(line)
                limit = TIMEOUT_S
