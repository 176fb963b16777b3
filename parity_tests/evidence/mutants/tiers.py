"""`python -m parity_tests.evidence.mutants.tiers`: the share of caught bugs that the fast tests catch.

A bug is a mutant of a seeded sample or one of the catalogue of injected bugs. `make tiers` writes the page. A run that
is interrupted writes the page of the bugs that are judged so far; the next one goes on from there.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, named, patched_text, source
from parity_tests.evidence.journal import Journal
from parity_tests.evidence.mutants import places
from parity_tests.evidence.mutants.by_tests import TestRuns, reaching
from parity_tests.evidence.mutants.judged import why_equivalent
from parity_tests.evidence.mutants.mutant import Mutant
from parity_tests.evidence.mutants.reached import Memory, TestReach, of_tests, test_files
from parity_tests.evidence.page import bullets, by_component, joined, markdown_table, share, write, written_by
from parity_tests.evidence.workers import Workers
from shardproof.draw.profiles import EXAMPLES

PROMISED = 0.97
COUNT, CAP_S = 300, 600.0  # mutants, and seconds for the tests of one
MUTANTS, INJECTED = "mutants", "injected bugs"
COLUMNS = ("component", f"{MUTANTS}: fast of all", f"{INJECTED}: fast of all", "caught by none", "not run yet")
HEAD = """# Two tiers of tests

`make test` runs the fast tests: all tests without the mark `slow`, with {fast} examples for a property.
`make test-all` runs every test, with {all} examples. Of the bugs that all tests catch, the fast tests promise to
catch {promised:.0%}. This page has the counts.

A bug is one of {count} [mutants](mutants.md), drawn by a seed, or one of the [injected bugs](injected-bugs.md). A bug
is judged by the tests of its component that run the changed line: by the fast tests first, then, if these miss it, by
all tests. Tests outside the component's folder, such as the tests of every scheme, are not run in either tier. Mutants
and injected bugs that are equivalent are left out, and so are injected bugs that are expected to survive. A bug
whose tests take more than {cap:.0f} s is counted as not run.

Bugs are judged in an order that the seed draws, across components: after a stop, the judged bugs are a sample of all.
The run goes on where it was stopped: `build/tiers.jsonl` remembers what is judged.

{closing}

{written_by}

{table}
"""
EPILOG = """\b
Examples:
  python -m parity_tests.evidence.mutants.tiers --component layouts --count 60
  python -m parity_tests.evidence.mutants.tiers --page docs/tiers.md

\b
Exit status:
    0  the fast tests catch as many as promised
    1  fewer
    2  usage
"""


@dataclass(frozen=True)
class Verdict:
    """The fast test that catches a bug, or else the test of all that does; `is_open` where it is not known yet."""

    mutant: Mutant
    kind: str  # MUTANTS or INJECTED
    fast: str | None
    any: str | None
    is_open: bool


def of_bug(bug: InjectedBug) -> Mutant:
    """An injected bug as the change of a file's bytes."""
    patched = patched_text(bug)  # which says if its text does not occur once
    (symbol,) = (symbol for symbol in named(bug) if bug.old in source(symbol))
    before = (ROOT / symbol.file).read_text()[: symbol.start + source(symbol).index(bug.old)]
    start = len(before.encode())
    return Mutant(symbol.file, symbol.name, bug.kind, start, bug.old, bug.new, patched.first_line, patched.last_line)


def bugs(count: int, seed: int) -> list[tuple[str, Mutant]]:
    """The bugs that are judged, each with its kind."""
    sample = [mutant for mutant in places.sampled(count, seed) if not why_equivalent(mutant)]
    catalogue = [bug for bug in CATALOGUE if not (bug.equivalent or bug.survives)]
    return [(MUTANTS, each) for each in sample] + [(INJECTED, of_bug(bug)) for bug in catalogue]


def judge(
    mutants: Sequence[Mutant],
    memory: Memory,
    journal: Journal,
    workers: Workers,
    cap: float,
    show: Callable[[str], Any],
) -> None:
    """Judge the bugs that the journal lacks, in turn: by a component's fast tests, and by all if these miss one."""
    left = [mutant for mutant in mutants if verdict(MUTANTS, mutant, journal.of(mutant.key)).is_open]
    locks, traced = {mutant.component: threading.Lock() for mutant in left}, dict[str, list[TestReach]]()
    fast, every = (TestRuns(workers, (f"--hypothesis-profile={name}",)) for name in ("fast", "ci"))

    def tests_of(component: str) -> list[TestReach]:
        with locks[component]:
            if component not in traced:
                files = [file for file in test_files(component) if file.parent.name == component]
                traced[component] = of_tests(memory, files, workers, show)
            return traced[component]

    def judge_one(mutant: Mutant) -> None:
        tests = tests_of(mutant.component)
        show(f"{sum(not journal.of(each.key) for each in left)} left, {mutant.file} {mutant.symbol}")
        for name, runs, of_tier in (("fast", fast, [test for test in tests if not test.slow]), ("any", every, tests)):
            if name not in journal.of(mutant.key):
                failure = runs.first_failing(mutant, reaching(mutant, of_tier), cap)
                if workers.stopped.is_set():
                    return
                journal.add({"key": mutant.key, name: failure.test, f"{name}_capped": failure.capped})
            if journal.of(mutant.key)[name]:
                return

    workers.each(judge_one, left)


def verdict(kind: str, mutant: Mutant, record: dict[str, Any]) -> Verdict:
    """The verdict in the journal's record of a bug."""
    fast, caught = record.get("fast"), record.get("fast") or record.get("any")
    is_judged = bool(fast) or ("any" in record and (bool(caught) or not record["any_capped"]))
    is_open = not is_judged or (not fast and record["fast_capped"])
    return Verdict(mutant, kind, fast, caught, is_open)


def closing(verdicts: Sequence[Verdict], kind: str) -> str:
    """The share of one kind of bugs, in a sentence."""
    known = [each for each in verdicts if each.kind == kind and not each.is_open]
    total = sum(each.kind == kind for each in verdicts)
    text = f"{kind.capitalize()}: the fast tests catch {share(*_counts(known))} of those that all tests catch"
    return f"{text}; {len(known)} of {total} are judged so far." if len(known) < total else f"{text}, of {total}."


def _counts(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    return sum(bool(each.fast) for each in verdicts), sum(bool(each.any) for each in verdicts)


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each component and one for all."""
    groups = [*by_component(verdicts, lambda each: each.mutant.component), ("all", verdicts)]
    return markdown_table(COLUMNS, [_row(name, group) for name, group in groups])


def _row(name: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    known = [each for each in verdicts if not each.is_open]
    shares = [share(*_counts([each for each in known if each.kind == kind])) for kind in (MUTANTS, INJECTED)]
    return name, *shares, str(sum(not each.any for each in known)), str(len(verdicts) - len(known))


def missed(verdicts: Sequence[Verdict]) -> list[str]:
    """The bugs that only a slow test, or more examples, catches."""
    only = [(each.mutant, each.any) for each in verdicts if not each.is_open and each.any and not each.fast]
    return [f"`{bug.file}:{bug.first_line}`, {bug.kind}: `{bug.change}`, by `{test}`." for bug, test in only]


def is_promised(verdicts: Sequence[Verdict]) -> bool:
    """Whether the share is the promised one."""
    fast, caught = _counts([each for each in verdicts if not each.is_open])
    return fast >= PROMISED * caught


def page(verdicts: Sequence[Verdict], count: int, seed: int) -> str:
    """The page's text."""
    head = HEAD.format(
        fast=EXAMPLES["fast"], all=EXAMPLES["ci"], promised=PROMISED, count=count, cap=CAP_S,
        closing=bullets(closing(verdicts, kind) for kind in (MUTANTS, INJECTED)),
        written_by=written_by("make tiers", seed=seed), table=table(verdicts),
    )  # fmt: skip
    lines = missed(verdicts)
    return joined(head, *(("## Caught by all tests alone", bullets(lines)) if lines else ()))


def main(
    count: Annotated[int, typer.Option(min=1, help="Mutants, of each component in proportion.")] = COUNT,
    seed: Annotated[int, typer.Option(min=0, help="Another number draws other mutants.")] = 0,
    component: Annotated[list[str] | None, typer.Option(help="Judge only bugs in this folder of torch_impl.")] = None,
    kind: Annotated[str, typer.Option(help="Judge only mutants or only injected bugs.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    cap: Annotated[float, typer.Option(min=1, help="Seconds for the tests of one bug.")] = CAP_S,
    build: Annotated[Path, typer.Option(help="Where outcomes and reached lines are remembered.")] = Path("build"),
    page_file: Annotated[Path | None, typer.Option("--page", help="Write the page to this file.")] = None,
) -> None:
    """Judge bugs by the fast tests and by all tests, and print the share of caught bugs that the fast tests catch."""
    if kind not in ("", MUTANTS, INJECTED):
        raise typer.BadParameter(f"--kind {kind!r} is not mutants or 'injected bugs'")
    sample = bugs(count, seed)
    names = sorted({mutant.component for _, mutant in sample})
    if unknown := set(component or ()) - set(names):
        raise typer.BadParameter(f"--component {', '.join(sorted(unknown))} is not one of {', '.join(names)}")
    show = partial(print, file=sys.stderr, flush=True)
    memory, journal = Memory(build / "mutants_lines.jsonl"), Journal(build / "tiers.jsonl")
    chosen = [each for its_kind, each in sample if each.component in (component or names) and kind in ("", its_kind)]
    random.Random(seed).shuffle(chosen)
    with contextlib.suppress(KeyboardInterrupt):  # verdicts so far are shown and written
        judge(chosen, memory, journal, Workers(jobs), cap, show)
    verdicts = [verdict(its_kind, each, journal.of(each.key)) for its_kind, each in sample]
    shares = bullets(closing(verdicts, each) for each in (MUTANTS, INJECTED))
    print(joined(shares, table(verdicts), bullets(missed(verdicts))))
    if page_file:
        write(page(verdicts, count, seed), page_file)
    raise typer.Exit(int(not is_promised(verdicts)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
