"""The killing run: every fault on drawn cases of the schemes that it concerns, until an oracle sees it.

A scheme is concerned if it runs a line of the fault. A round is one example of each of the nearest schemes concerned,
those that run the fewest lines; the others are asked only where these see nothing. The baseline beside it is a parity
test as it is often written: two ranks, one shape, equal shards, three seeds, the same budgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parity_tests.harness.declare import discover
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.declare.table import TABLE
from parity_tests.harness.judge import bridge
from parity_tests.harness.report.report import Report
from parity_tests.harness.run.dtensor_advice import without_advice
from parity_tests.injected_bugs.injected_bug import InjectedBug
from parity_tests.injected_bugs.patch import Plot
from parity_tests.injected_bugs.symbols import patched_text
from parity_tests.injected_bugs.trials import Course, Trial

EXAMPLES = 40
NEAREST, FARTHEST = 5, 15  # of the schemes concerned: asked first, and asked at all
MORE_ROUNDS = 5  # after the first catch: their words too are compared with what the fault expects
NOT_TRIED = {"compiled_logprob": "would be compiled anew for each fault and shape; its eager twin is tried"}


class FalseAlarm(RuntimeError):
    """A scheme that is not equal to its reference on a case without any fault: no kill can be told from it."""


@dataclass(frozen=True)
class Catch:
    """One report that was not equal: whose, in which round, which oracles spoke and in what words."""

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
    """What became of one fault. `baseline` counts values and failed ranks alone, `baseline_conduct` all oracles."""

    fault: InjectedBug
    concerned: int
    judged: int
    catches: tuple[Catch, ...]
    baseline: bool
    baseline_conduct: bool
    seconds: float

    @property
    def killed(self) -> bool:
        return bool(self.catches)

    @property
    def examples(self) -> int | None:
        """Examples to kill: of the scheme that saw it first."""
        return self.catches[0].example if self.catches else None

    @property
    def examples_by_value(self) -> int | None:
        """Examples until values alone, or a failed rank, give it away."""
        return next((catch.example for catch in self.catches if catch.by_value), None)

    @property
    def note(self) -> str | None:
        """`first` if the first catch says what is expected, `later` if one of the next does, `wrong` if none."""
        if not self.catches:
            return None
        said = [is_said(self.fault.expect, catch) for catch in self.catches]
        return "first" if said[0] else "later" if any(said) else "wrong"


class Range:
    """The healthy schemes and their trials, shared by all faults."""

    def __init__(
        self,
        examples: int = EXAMPLES,
        engine: str = "lockstep",
        schemes: Sequence[Declared] = (),
        cache: str | None = None,
    ) -> None:
        bridge.start(cache)
        self.engine = engine
        tried = schemes or [made for made in discover.built_in() if made.name not in NOT_TRIED]
        self.courses = [Course(made, examples, engine) for made in tried if engine in made.engines]

    def concerned(self, fault: InjectedBug) -> list[Course]:
        """Courses of the schemes that run a line of the fault, the nearest first."""
        patched = patched_text(fault)
        lines = patched.first_line, patched.last_line
        those = [course for course in self.courses if course.runs(patched.file, *lines)]
        if not those:  # outside of functions, or where the first cases do not come: whoever runs anything of the file
            those = [course for course in self.courses if patched.file in course.files]
        return sorted(those, key=lambda course: len(course.lines))

    def outcome(self, fault: InjectedBug) -> Outcome:
        """Try one fault. Errors: StaleBug; FalseAlarm for a scheme that fails without it."""
        start = time.perf_counter()
        concerned = self.concerned(fault)
        plot, patched = planted(fault, [course.scheme for course in concerned])
        nearest, others = concerned[:NEAREST], concerned[NEAREST:FARTHEST]
        with plot:
            catches, judged = self._hunt(nearest, patched, plot)
            if not catches and not fault.equivalent:
                catches, more = self._hunt(others, patched, plot)
                judged += more
            fixed = [t.on(patched[t.scheme.key]) for course in nearest for t in course.fixed]
        values = any(report.failure or not all(row.ok for row in report.rows) for report in fixed)
        conduct = any(not report.ok for report in fixed)
        return Outcome(fault, len(concerned), judged, tuple(catches), values, conduct, time.perf_counter() - start)

    def _hunt(self, courses: Sequence[Course], patched: dict[str, Declared], plot: Plot) -> tuple[list[Catch], int]:
        """Catches in rounds until some rounds after the first, and until values give it away; examples to the first."""
        judged, catches = 0, []
        for example, trial in _rounds(courses):
            if any(catch.by_value for catch in catches) and example > catches[0].example + MORE_ROUNDS:
                break
            judged += not catches
            catches += self._catch(trial, patched, plot, example)
        return catches, judged

    def _catch(self, trial: Trial, patched: dict[str, Declared], plot: Plot, example: int) -> list[Catch]:
        report = trial.on(patched[trial.scheme.key], plot.ship if self.engine != "lockstep" else None)
        if report.ok:
            return []
        with plot.lifted():
            healthy = trial.healthy
        if not healthy.ok:
            raise FalseAlarm(
                f"scheme {trial.scheme.name!r} fails without any fault: {words(healthy)}\n{trial.case.json}"
            )
        return [Catch(trial.scheme.name, example, oracles(report), words(report))]


def planted(fault: InjectedBug, schemes: Iterable[Declared]) -> tuple[Plot, dict[str, Declared]]:
    """The fault's plot, and the schemes declared anew in it; the table keeps the healthy ones.

    They keep the healthy references too: no fault stands in one, and what is compiled of it serves all faults.
    """
    keys = [made.key for made in schemes]
    healthy = dict(TABLE)
    try:
        plot = Plot.of(fault, dict.fromkeys(key.partition(":")[0] for key in keys))
        return plot, {key: replace(TABLE[key], reference=healthy[key].reference) for key in keys}
    finally:
        TABLE.clear()
        TABLE.update(healthy)


def oracles(report: Report) -> tuple[str, ...]:
    """Which oracles spoke: a failed rank's cause, or any of value, gradient, protocol, cost and hygiene."""
    if report.failure is not None:
        return (report.failure.cause,)
    spoke = {
        "value": any(not row.ok for row in report.rows if row.role == "output"),
        "gradient": any(not row.ok for row in report.rows if row.role == "gradient"),
        "protocol": report.protocol,
        "cost": report.cost,
        "hygiene": report.hygiene,
    }
    return tuple(name for name, found in spoke.items() if found)


def words(report: Report) -> str:
    """All that the report says about what is wrong."""
    notes = [note for found in report.notes.values() for note in found]
    failure = [] if report.failure is None else [str(report.failure)]
    return "\n".join([*failure, *notes, *report.protocol, *report.cost, *report.hygiene])


def is_said(expect: str, catch: Catch) -> bool:
    """Whether the oracle that is expected spoke, with the words that are expected."""
    oracle, _, piece = expect.partition(":")
    return oracle.strip() in catch.oracles and piece.strip() in catch.words


@without_advice()
def killing_run(
    faults: Sequence[InjectedBug], ranges: Range, progress: Callable[[int, Outcome], Any] | None = None
) -> list[Outcome]:
    """Try all faults in turn; `progress(done, outcome)` is called after each."""
    outcomes = []
    for fault in faults:
        outcomes.append(ranges.outcome(fault))
        if progress:
            progress(len(outcomes), outcomes[-1])
    return outcomes


def _rounds(courses: Sequence[Course]) -> Iterator[tuple[int, Trial]]:
    """Example after example, each of every scheme."""
    for i in range(max((len(course.drawn) for course in courses), default=0)):
        for course in courses:
            if i < len(course.drawn):
                yield i + 1, course.drawn[i]
