"""Judge a mutant by the tests that run its line: pytest on a tree where one file differs.

The tree has copies of the packages, and the copy of production has the change. So every process that a test starts
sees the mutant too, and nothing is written to the repository.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parity_tests.evidence.injected_bugs.injected_bug import PRODUCTION, ROOT
from parity_tests.evidence.mutants import pytest_process
from parity_tests.evidence.mutants.mutant import Mutant, changed
from parity_tests.evidence.mutants.places import lines_of_users
from parity_tests.evidence.mutants.reached import TestReach
from parity_tests.evidence.workers import Workers

CAP_S = 150.0  # for all tests of a mutant
SLOWER, AT_LEAST_S = 3.0, 90.0  # the time limit of a test: a multiple of the healthy run's time, and a minimum
PLUGIN = ("-p", "parity_tests.evidence.mutants.selection_plugin")
NO_TESTS = 5  # pytest's exit status if it collects none of the listed tests


@dataclass(frozen=True)
class Failure:
    """The first test that fails, or the file that cannot be collected; `capped` if the time ends before one fails."""

    test: str | None
    capped: bool = False


class TestRuns:
    """Runs tests on mutants, and on production as it is: a test that fails there too has not caught the mutant."""

    __test__ = False  # pytest collects no class of this name

    def __init__(self, workers: Workers, options: Sequence[str] = ()) -> None:
        self.workers, self.options = workers, options  # options of pytest
        self._healthy: dict[str, bool] = {}
        self._lock = threading.Lock()

    def first_failing(self, mutant: Mutant, tests: Sequence[TestReach], cap: float) -> Failure:
        """The first test that fails on the mutant but not on production; all run in one process, the fastest first."""
        left, deadline = sorted(tests, key=lambda test: test.seconds), time.monotonic() + cap
        with tree_of(mutant) as tree:
            while left:
                failure = self._first_failing(tree, left, deadline - time.monotonic())
                if failure.test is None:
                    return failure
                failing = [test for test in left if test.name == failure.test] or left[:1]
                if self._passes_without(failing[0]):
                    return failure
                left.remove(failing[0])
        return Failure(None)

    def _first_failing(self, tree: Path, tests: Sequence[TestReach], limit: float) -> Failure:
        with tempfile.TemporaryDirectory() as folder:
            chosen, begun = Path(folder) / "chosen.json", Path(folder) / "begun.jsonl"
            chosen.write_text(json.dumps([(test.name, max(SLOWER * test.seconds, AT_LEAST_S)) for test in tests]))
            environment = {"TESTS_FROM": str(chosen), "TESTS_TO": str(begun)}
            files = dict.fromkeys(test.name.partition("::")[0] for test in tests)
            status = pytest_process.status(tree, [*PLUGIN, *self.options, *files], environment, limit, self.workers)
            names = [json.loads(line) for line in begun.read_text().splitlines()] if begun.is_file() else []
        if status is None:
            return Failure(None, capped=True)
        if status in (0, NO_TESTS):
            return Failure(None)
        return Failure(names[-1] if names else tests[0].name.partition("::")[0])

    def _passes_without(self, test: TestReach) -> bool:
        if test.name not in self._healthy:
            failure = self._first_failing(ROOT, [test], CAP_S)
            with self._lock:
                self._healthy[test.name] = failure == Failure(None)
        return self._healthy[test.name]


def reaching(mutant: Mutant, tests: Sequence[TestReach]) -> list[TestReach]:
    """Tests that run the line or a user of its import-time value; if none, those whose file runs it at collection."""
    lines = range(mutant.first_line, mutant.last_line + 1)
    numbers = lines_of_users(mutant).union(lines)
    found = [test for test in tests if test.runs(mutant.file, numbers)]
    return found or [test for test in tests if any(line in lines for line in test.collected.get(mutant.file, ()))]


@contextmanager
def tree_of(*mutants: Mutant) -> Iterator[Path]:
    """A copy of the packages with these changes, which must not overlap, and links to all else.

    Tests are copied too: processes that they start in the folder above their own file have the changes.
    """
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        tree = Path(folder)
        for path in ROOT.iterdir():
            if path.name in (PRODUCTION, "jax_ref", "parity_tests"):
                shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (tree / path.name).symlink_to(path)
        for file in {mutant.file for mutant in mutants}:
            (tree / file).write_bytes(changed(file, [mutant for mutant in mutants if mutant.file == file]))
        yield tree
