"""The first notes of one injected bug's smallest failing case: of the case alone, and after the experiments.

Not a part of `first_notes`: a spawned process imports the module of the function that it calls, and cannot import that.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug, patched_text
from parity_tests.evidence.injected_bugs.report import without_schedule_warnings
from parity_tests.evidence.injected_bugs.runner import NOT_TRIED, patched_schemes
from parity_tests.evidence.injected_bugs.trials import SchemeTrials
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.engines.speed_advice import without_advice
from shardproof.experiments.notes import check_notes
from shardproof.experiments.smallest import shrink
from shardproof.experiments.undecided import mark_undecided
from shardproof.report.report import Report

SCHEMES, EXAMPLES = 3, 12  # of a bug: the nearest schemes and drawn cases of each that are tried
TRACED = 3  # of the drawn cases that tell which lines a scheme runs


class Headlines(NamedTuple):
    """The first notes, whether the case is called undecided, and how many seconds the experiments took."""

    alone: str
    tested: str
    is_undecided: bool
    seconds: float


@without_advice()
def of_bug(bug: InjectedBug) -> Headlines | None:
    """The headlines of a bug, from the schemes of its component; a process traces them once."""
    with without_schedule_warnings():
        return headlines(bug, _trials(bug.component))


@cache
def _trials(component: str) -> list[SchemeTrials]:
    tried = (scheme for scheme in discover.built_in() if f".{component}." in scheme.key)
    return [
        SchemeTrials(s, EXAMPLES, traced=TRACED) for s in tried if s.name not in NOT_TRIED and "lockstep" in s.engines
    ]


def headlines(bug: InjectedBug, component_trials: Iterable[SchemeTrials]) -> Headlines | None:
    """The notes on the first failing case that has any, after it is shrunk; None if no case has notes."""
    patch = patched_text(bug)
    # Tracing takes most of the time: schemes of files that name the symbol are traced first.
    symbol = re.compile(rf"\b{re.escape(bug.at.partition(':')[2].partition('.')[0])}\b")
    by_name = sorted(component_trials, key=lambda trials: not symbol.search(Path(trials.scheme.file).read_text()))
    running = (trials for trials in by_name if trials.runs(patch.file, patch.replaced_lines))
    affected = list(islice(running, SCHEMES))
    modules, patched = patched_schemes(bug, [each.scheme for each in affected])
    with modules:
        for each in affected:
            scheme = patched[each.scheme.key]
            for trial in each.drawn:
                report = trial.on(scheme)
                if report.notes:
                    return _headlines(scheme, shrink(scheme, report, {}))
    return None


def _headlines(scheme: Declared, report: Report) -> Headlines:
    start = time.perf_counter()
    after = check_notes(scheme, report)
    seconds = time.perf_counter() - start
    first = next(iter(report.notes))
    alone, tested = str(report.notes[first][0]), str(after.notes[first][0])
    return Headlines(alone, tested, mark_undecided(scheme, report).is_undecided, seconds)
