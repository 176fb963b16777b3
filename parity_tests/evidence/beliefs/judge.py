"""Judge wrong beliefs by the default cases of `shardproof verify`, and the missed ones by fast tests.

A belief is judged by the schemes that run its line, the nearest of each path through its function first: schemes of its
component, then of the others. Each is verified with default settings, up to its first failing case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parity_tests.evidence.beliefs.belief import Belief
from parity_tests.evidence.injected_bugs.injected_bug import patched_text
from parity_tests.evidence.injected_bugs.report import without_schedule_warnings
from parity_tests.evidence.injected_bugs.runner import FARTHEST, BugRunner, nearest_first, oracles, patched_schemes
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants.by_tests import TestRuns, reaching
from parity_tests.evidence.mutants.reached import Memory, TestReach, of_tests, test_files
from parity_tests.evidence.mutants.tiers import of_bug
from parity_tests.evidence.page import by_component
from parity_tests.evidence.workers import Workers
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.engines.speed_advice import without_advice
from shardproof.report.report import Report
from shardproof.verification import verify

TRACED = 4  # drawn cases that tell which lines a scheme runs
LIMIT_S = 60.0  # of this process's time: after it no further scheme is verified for a belief
CAP_S = 600.0  # for the fast tests of one belief
Show = Callable[[str], Any]


class Caught(Exception):
    """A drawn case failed: nothing more is drawn, and no smaller case is looked for."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


@dataclass
class DrawnJudge:
    """Judges beliefs by the schemes of their component; with `is_all` by the other components' schemes too."""

    cache: str
    is_all: bool
    show: Show

    def record(self, belief: Belief) -> dict[str, Any]:
        """The scheme and the oracle that catch a belief, or none, and the number of schemes that were verified."""
        start, tried = time.monotonic(), 0
        caught: dict[str, Any] = {"drawn": None, "oracle": None}
        for runners in ([self._runner(belief.component)], self._others(belief.component)):
            affected = [trials for runner in runners for trials in runner.affected(belief)]
            nearest = nearest_first(affected, patched_text(belief))[:FARTHEST]
            tried += len(nearest)
            caught = _first_catch(belief, [trials.scheme for trials in nearest])
            if caught["drawn"]:
                break
        return {**caught, "schemes": tried, "is_all": self.is_all, "seconds": round(time.monotonic() - start, 1)}

    def _others(self, component: str) -> list[BugRunner]:
        return [self._runner(folder) for folder in self._schemes if folder != component] if self.is_all else []

    @cached_property
    def _schemes(self) -> dict[str, list[Declared]]:
        return dict(by_component(discover.built_in(), lambda scheme: scheme.fn.__module__.split(".")[1]))

    @cached_property
    def _runners(self) -> dict[str, BugRunner]:
        return {}

    def _runner(self, folder: str) -> BugRunner:
        if folder not in self._runners:
            schemes = self._schemes[folder]
            runner = BugRunner(TRACED, schemes=schemes, cache=self.cache, with_baseline=False, traced=TRACED)
            for trials in runner.schemes:
                self.show(f"lines of {trials.scheme.name}")
                trials.trace()
            self._runners[folder] = runner
        return self._runners[folder]


def _first_catch(belief: Belief, schemes: Sequence[Declared]) -> dict[str, Any]:
    try:
        modules, patched = patched_schemes(belief, schemes)
    except Exception as error:  # whatever the import of a changed file raises
        return {"drawn": "import", "oracle": f"{type(error).__name__}: {error}"}
    start = time.process_time()
    with modules:
        for scheme in schemes:
            if time.process_time() - start > LIMIT_S:
                break
            try:
                verify(patched[scheme.key], found=_stop)
            except Caught as caught:
                return {"drawn": scheme.name, "oracle": ", ".join(oracles(caught.report))}
    return {"drawn": None, "oracle": None}


def _stop(report: Report) -> None:
    if report.failed:
        raise Caught(report)


@without_advice()
def by_drawn_cases(beliefs: Sequence[Belief], journal: Journal, judge: DrawnJudge) -> None:
    """Judge those that the journal lacks."""
    for belief in beliefs:
        key = of_bug(belief).key
        if "drawn" not in journal.of(key):
            with without_schedule_warnings():
                record = judge.record(belief)
            judge.show(f"{record['drawn'] or 'NOT CAUGHT'} ({record['seconds']} s): {belief.name}")
            journal.add({"key": key, "name": belief.name, **record})


def by_fast_tests(beliefs: Sequence[Belief], memory: Memory, journal: Journal, workers: Workers, show: Show) -> None:
    """Judge those that drawn cases miss by the fast tests of their component that run the line."""
    runs, traced = TestRuns(workers, ("--hypothesis-profile=fast",)), dict[str, list[TestReach]]()
    for belief in beliefs:
        mutant = of_bug(belief)
        record = journal.of(mutant.key)
        if "drawn" not in record or record["drawn"] or "tests" in record:
            continue
        if belief.component not in traced:
            files = [file for file in test_files(belief.component) if file.parent.name == belief.component]
            traced[belief.component] = of_tests(memory, files, workers, show)
        tests = [test for test in traced[belief.component] if not test.slow]
        failure = runs.first_failing(mutant, reaching(mutant, tests), CAP_S)
        if workers.stopped.is_set():
            return
        show(f"{failure.test or 'NOT CAUGHT'}: {belief.name}")
        journal.add({"key": mutant.key, "tests": failure.test, "capped": failure.capped})
