"""Injected bugs over several processes: each finds the lines of every scheme and tries its share of the bugs.

Not a part of `__main__`: a spawned process imports the module of the function that it calls, and cannot import that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from parity_tests.evidence.injected_bugs import report
from parity_tests.evidence.injected_bugs.injected_bug import InjectedBug
from parity_tests.evidence.injected_bugs.runner import BugRunner, Outcome, run_bugs
from parity_tests.evidence.workers import Workers
from shardproof.declare import discover


@dataclass(frozen=True)
class Trying:
    """How bugs are tried: `examples` of each scheme whose name contains `scheme`, on an engine."""

    examples: int
    engine: str
    jax_cache: str | None
    scheme: str = ""


def run_in_processes(jobs: int, bugs: Sequence[InjectedBug], trying: Trying) -> list[Outcome]:
    """Outcomes in the order of the bugs. Process i of `jobs` tries every `jobs`-th bug from the i-th on."""
    if jobs == 1:
        return _outcomes(bugs, trying)
    workers = Workers(jobs)
    shares = workers.each(lambda i: workers.call(_outcomes, bugs[i::jobs], trying), range(jobs))
    by_name = {outcome.bug.name: outcome for share in shares for outcome in share}
    return [by_name[bug.name] for bug in bugs]


def _outcomes(bugs: Sequence[InjectedBug], trying: Trying) -> list[Outcome]:
    progress = report.Progress(Console(stderr=True))

    def show(done: int, outcome: Outcome) -> None:
        progress("bug", done, len(bugs), outcome.bug.name)

    schemes = discover.find([f"*{trying.scheme}*"])
    with report.without_schedule_warnings():
        runner = BugRunner(trying.examples, trying.engine, schemes, cache=trying.jax_cache)
        for number, trials in enumerate(runner.schemes, 1):
            progress("lines of scheme", number, len(runner.schemes), trials.scheme.name)
            trials.trace()
        return run_bugs(bugs, runner, show)
