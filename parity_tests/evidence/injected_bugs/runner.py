"""Run every injected bug on drawn cases of the schemes that it affects, until an oracle catches it.

A scheme is affected if it runs a line of the bug. If the bug is in a constant, a scheme is affected if it runs a line
with the constant's name. A round is one example of each of the nearest affected schemes: for each path through the
bug's function, the scheme that runs the fewest lines. The others are tried only if these see nothing. The baseline
beside it is a parity test as it is often written: two ranks, one shape, equal shards, three seeds, the same budgets.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, PatchedFile, patched_text
from parity_tests.evidence.injected_bugs.patched_modules import PatchedModules
from parity_tests.evidence.injected_bugs.trials import QUIET_S, TRACED, SchemeTrials, Trial
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.declare.discover import TABLE
from shardproof.engines.speed_advice import without_advice
from shardproof.judge import bridge
from shardproof.report.report import Report

EXAMPLES = 40
NEAREST, FARTHEST = 5, 15  # of the affected schemes: how many are tried first, and how many at all
MORE_ROUNDS = 5  # after the first catch: their words too are compared with the bug's expected words
NOT_TRIED = {"compiled_logprob": "would be compiled again for each bug and shape; its eager twin is tried"}


class FalseAlarm(RuntimeError):
    """A scheme differs from its reference without any bug, so its reports say nothing about a bug."""


@dataclass(frozen=True)
class Catch:
    """One report that was not equal: its scheme, round, oracles and words."""

    scheme: str
    example: int
    oracles: tuple[str, ...]
    words: str

    @property
    def by_value(self) -> bool:
        """Whether a comparison of values alone, or a failed rank, would have seen it."""
        return not set(self.oracles) <= {"protocol", "cost", "hygiene"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one bug. `baseline` counts values and failed ranks alone, `baseline_all_oracles` all oracles."""

    bug: InjectedBug
    affected: int
    judged: int
    catches: tuple[Catch, ...]
    baseline: bool
    baseline_all_oracles: bool
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.catches)

    @property
    def examples(self) -> int | None:
        """Examples until it is caught, of the scheme that caught it first."""
        return self.catches[0].example if self.catches else None

    @property
    def examples_by_value(self) -> int | None:
        """Examples until values alone, or a failed rank, catch it."""
        return next((catch.example for catch in self.catches if catch.by_value), None)

    @property
    def note(self) -> str | None:
        """`first` if the first catch has the expected words, `later` if one of the next does, `wrong` if none."""
        if not self.catches:
            return None
        reported = [is_reported(self.bug.expect, catch) for catch in self.catches]
        return "first" if reported[0] else "later" if any(reported) else "wrong"


class BugRunner:
    """Runs bugs on the trials of the healthy schemes, which all bugs share; without a baseline, its counts are 0.

    `traced` drawn cases of each scheme tell which lines it runs. A bug that is run `until_caught` is not tried again
    for the words of later catches, and for a catch by values alone.
    """

    def __init__(
        self,
        examples: int = EXAMPLES,
        engine: str = "lockstep",
        schemes: Sequence[Declared] = (),
        cache: str | None = None,
        with_baseline: bool = True,
        traced: int = TRACED,
        until_caught: bool = False,
    ) -> None:
        bridge.start(cache)
        self.engine, self.with_baseline, self.until_caught = engine, with_baseline, until_caught
        tried = [scheme for scheme in schemes or discover.built_in() if scheme.name not in NOT_TRIED]
        self.schemes = [SchemeTrials(scheme, examples, engine, traced) for scheme in tried if engine in scheme.engines]

    def affected(self, bug: InjectedBug) -> list[SchemeTrials]:
        """Trials of the schemes that run a line of the bug, the nearest first.

        If no scheme does, a line of its file with the symbol's name counts, and then any line of its file.
        """
        patched = patched_text(bug)
        # No scheme runs the line of a constant, which import does; nor do its first cases run every line of a function.
        for lines in (patched.replaced_lines, lines_that_name(bug, patched.file), None):
            affected = [trials for trials in self.schemes if trials.runs(patched.file, lines)]
            if affected:
                break
        return nearest_first(affected, patched)

    def outcome(self, bug: InjectedBug) -> Outcome:
        """Try one bug. Errors: StaleBug; FalseAlarm for a scheme that fails without it."""
        start = time.perf_counter()
        affected = self.affected(bug)
        modules, patched = patched_schemes(bug, [trials.scheme for trials in affected])
        nearest, farther = affected[:NEAREST], affected[NEAREST:FARTHEST]
        with modules:
            catches, judged = self._search(nearest, patched, modules)
            if not catches and not bug.equivalent:
                catches, more = self._search(farther, patched, modules)
                judged += more
            baseline = [trial for trials in nearest for trial in trials.fixed] if self.with_baseline else []
            fixed = [trial.on(patched[trial.scheme.key]) for trial in baseline]
        values = any(report.failure or not all(tensor.ok for tensor in report.tensors) for report in fixed)
        all_oracles = any(not report.ok for report in fixed)
        return Outcome(bug, len(affected), judged, tuple(catches), values, all_oracles, time.perf_counter() - start)

    def _search(
        self, schemes: Sequence[SchemeTrials], patched: dict[str, Declared], modules: PatchedModules
    ) -> tuple[list[Catch], int]:
        """Catches in rounds until some rounds after the first, and until values catch it; examples to the first."""
        judged, catches = 0, []
        for example, trial in rounds([trials.drawn for trials in schemes]):
            if catches and self.until_caught:
                break
            if any(catch.by_value for catch in catches) and example > catches[0].example + MORE_ROUNDS:
                break
            judged += not catches
            catches += self._catch(trial, patched, modules, example)
        return catches, judged

    def _catch(self, trial: Trial, patched: dict[str, Declared], modules: PatchedModules, example: int) -> list[Catch]:
        wrap_program = modules.wrap_program if self.engine != "lockstep" else None
        report = trial.on(patched[trial.scheme.key], wrap_program, QUIET_S)  # no bug of the catalogue runs for ever
        if report.ok:
            return []
        with modules.suspended():
            healthy = trial.healthy
        if healthy.is_undecided:
            return []
        if not healthy.ok:
            raise FalseAlarm(f"scheme {trial.scheme.name!r} fails without any bug: {words(healthy)}\n{trial.case.json}")
        return [Catch(trial.scheme.name, example, oracles(report), words(report))]


def nearest_first(affected: Iterable[SchemeTrials], patched: PatchedFile) -> list[SchemeTrials]:
    """The scheme of each path through the symbol that runs the fewest lines, then the next of each path."""
    # Most schemes evaluate a condition and few enter its branch: the smallest alone may all take the same path.
    paths: dict[frozenset[int], list[SchemeTrials]] = {}
    for trials in sorted(affected, key=lambda trials: len(trials.lines)):
        path = frozenset(number for number in patched.symbol_lines if (patched.file, number) in trials.lines)
        paths.setdefault(path, []).append(trials)
    return [trials for turn in itertools.zip_longest(*paths.values()) for trials in turn if trials is not None]


def lines_that_name(bug: InjectedBug, file: str) -> list[int]:
    """The lines of a file that contain the name of the bug's symbol."""
    name = re.compile(rf"\b{re.escape(bug.at.rpartition(':')[2].rpartition('.')[2])}\b")
    return [number for number, line in enumerate((ROOT / file).read_text().splitlines(), 1) if name.search(line)]


def patched_schemes(bug: InjectedBug, schemes: Iterable[Declared]) -> tuple[PatchedModules, dict[str, Declared]]:
    """The bug's modules, and the schemes declared again in them."""
    return schemes_under(patched_text(bug), schemes)


def schemes_under(patched: PatchedFile, schemes: Iterable[Declared]) -> tuple[PatchedModules, dict[str, Declared]]:
    """The modules with a patched file, and the schemes declared again in them; the table keeps the healthy ones.

    They keep the healthy references too: no bug is in one, and a compiled reference serves all bugs.
    """
    keys = [scheme.key for scheme in schemes]
    healthy = dict(TABLE)
    try:
        modules = PatchedModules(patched.file, patched.text, dict.fromkeys(key.partition(":")[0] for key in keys))
        return modules, {key: replace(TABLE[key], reference=healthy[key].reference) for key in keys}
    finally:
        TABLE.clear()
        TABLE.update(healthy)


def oracles(report: Report) -> tuple[str, ...]:
    """Which oracles reported it: a failed rank's cause, or any of value, gradient, protocol, cost and hygiene."""
    if report.failure is not None:
        return (report.failure.cause,)
    reported = {
        "value": any(not tensor.ok for tensor in report.tensors if tensor.role == "output"),
        "gradient": any(not tensor.ok for tensor in report.tensors if tensor.role == "gradient"),
        "protocol": report.protocol,
        "cost": report.cost,
        "hygiene": report.hygiene,
    }
    return tuple(name for name, evidence in reported.items() if evidence)


def words(report: Report) -> str:
    """All sentences of the report about the failure."""
    notes = [note for explanations in report.notes.values() for note in explanations]
    failure = [] if report.failure is None else [str(report.failure)]
    return "\n".join([*failure, *notes, *report.protocol, *report.cost, *report.hygiene])


def is_reported(expect: str, catch: Catch) -> bool:
    """Whether the expected oracle reported, in the expected words."""
    oracle, _, text = expect.partition(":")
    return oracle.strip() in catch.oracles and text.strip() in catch.words


@without_advice()
def run_bugs(
    bugs: Sequence[InjectedBug], runner: BugRunner, progress: Callable[[int, Outcome], Any] | None = None
) -> list[Outcome]:
    """Try all bugs in turn; `progress(done, outcome)` is called after each."""
    outcomes = []
    for bug in bugs:
        outcomes.append(runner.outcome(bug))
        if progress:
            progress(len(outcomes), outcomes[-1])
    return outcomes


def rounds(schemes: Sequence[Sequence[Trial]]) -> Iterator[tuple[int, Trial]]:
    """Example after example, each of every scheme."""
    for example, trials in enumerate(itertools.zip_longest(*schemes), 1):
        yield from ((example, trial) for trial in trials if trial is not None)
