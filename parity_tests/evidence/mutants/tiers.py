"""`python -m parity_tests.evidence.mutants.tiers`: how many bugs the fast tests catch of those that all tests catch.

A bug is a mutant of a seeded sample or one of the catalogue of injected bugs. `make tiers` writes the page; it goes on
where it was stopped.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE
from parity_tests.evidence.injected_bugs.injected_bug import ROOT, InjectedBug, named, patched_text, source
from parity_tests.evidence.injected_bugs.report import markdown, share
from parity_tests.evidence.mutants import places
from parity_tests.evidence.mutants.by_tests import TestRuns, reaching
from parity_tests.evidence.mutants.journal import Journal
from parity_tests.evidence.mutants.judged import why_equivalent
from parity_tests.evidence.mutants.mutant import Mutant
from parity_tests.evidence.mutants.reached import Memory, of_tests, test_files
from parity_tests.evidence.mutants.workers import Workers
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

{closing}

Written by `make tiers` on {date} with Python {python}, torch {torch}, jax {jax}, seed {seed}.
A stopped run resumes: `build/tiers.jsonl` has the results so far.

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
    """Judge the mutants of one component that the journal lacks: by its fast tests, and by all where these miss one."""
    left = [mutant for mutant in mutants if verdict(MUTANTS, mutant, journal.of(mutant)).is_open]
    if not left:
        return
    tests = of_tests(memory, _files(left[0].component), workers, show)
    fast, every = (TestRuns(workers, (f"--hypothesis-profile={name}",)) for name in ("fast", "ci"))
    tiers = (("fast", fast, [test for test in tests if not test.slow]), ("any", every, tests))

    def judge_one(mutant: Mutant) -> None:
        show(f"{sum(not journal.of(each) for each in left)} left, {mutant.file} {mutant.symbol}")
        for name, runs, of_tier in tiers:
            if name not in journal.of(mutant):
                failure = runs.first_failing(mutant, reaching(mutant, of_tier), cap)
                if workers.stopped.is_set():
                    return
                journal.add({"key": mutant.key, name: failure.test, f"{name}_capped": failure.capped})
            if journal.of(mutant)[name]:
                return

    workers.each(judge_one, left)


def _files(component: str) -> list[Path]:
    return [file for file in test_files(component) if file.parent.name == component]


def verdict(kind: str, mutant: Mutant, record: dict[str, Any]) -> Verdict:
    """What the journal's record of a bug says."""
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
    names = sorted({each.mutant.component for each in verdicts})
    rows = [(name, [each for each in verdicts if each.mutant.component == name]) for name in names]
    return markdown(COLUMNS, [_row(name, each) for name, each in [*rows, ("all", list(verdicts))]])


def _row(name: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    known = [each for each in verdicts if not each.is_open]
    shares = [share(*_counts([each for each in known if each.kind == kind])) for kind in (MUTANTS, INJECTED)]
    return name, *shares, str(sum(not each.any for each in known)), str(len(verdicts) - len(known))


def missed(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each bug that only a slow test, or more examples, catches."""
    only = [(each.mutant, each.any) for each in verdicts if not each.is_open and each.any and not each.fast]
    return [f"- `{bug.file}:{bug.first_line}`, {bug.kind}: `{bug.change}`, by `{test}`." for bug, test in only]


def is_promised(verdicts: Sequence[Verdict]) -> bool:
    """Whether the share is the promised one."""
    fast, caught = _counts([each for each in verdicts if not each.is_open])
    return fast >= PROMISED * caught


def page(verdicts: Sequence[Verdict], count: int, seed: int) -> str:
    """The page's text."""
    text = HEAD.format(
        fast=EXAMPLES["fast"], all=EXAMPLES["ci"], promised=PROMISED, count=count, cap=CAP_S, seed=seed,
        closing="\n".join(f"- {closing(verdicts, kind)}" for kind in (MUTANTS, INJECTED)),
        date=date.today().isoformat(), python=platform.python_version(), torch=version("torch"), jax=version("jax"),
        table=table(verdicts),
    )  # fmt: skip
    lines = missed(verdicts)
    return text + ("\n## Caught by all tests alone\n\n" + "\n".join(lines) + "\n" if lines else "")


def main(
    count: Annotated[int, typer.Option(min=1, help="Mutants, of each component in proportion.")] = COUNT,
    seed: Annotated[int, typer.Option(min=0, help="Another number draws other mutants.")] = 0,
    component: Annotated[list[str] | None, typer.Option(help="Judge those of this folder of torch_impl alone.")] = None,
    kind: Annotated[str, typer.Option(help="Judge mutants or injected bugs alone.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    cap: Annotated[float, typer.Option(min=1, help="Seconds for the tests of one bug.")] = CAP_S,
    build: Annotated[Path, typer.Option(help="Where outcomes and reached lines are remembered.")] = Path("build"),
    page_file: Annotated[Path | None, typer.Option("--page", help="Write the page to this file.")] = None,
) -> None:
    """Judge bugs by the fast tests and by all tests, and print how many the fast ones catch of those that all catch."""
    if kind not in ("", MUTANTS, INJECTED):
        raise typer.BadParameter(f"--kind {kind!r} is not mutants or 'injected bugs'")
    sample = bugs(count, seed)
    names = sorted({mutant.component for _, mutant in sample})
    if unknown := set(component or ()) - set(names):
        raise typer.BadParameter(f"--component {', '.join(sorted(unknown))} is not one of {', '.join(names)}")
    stderr = Console(stderr=True)

    def show(line: str) -> None:
        stderr.print(line, highlight=False, markup=False, soft_wrap=True)

    memory, journal = Memory(build / "mutants_lines.json"), Journal(build / "tiers.jsonl")
    for name in component or names:
        chosen = [each for its_kind, each in sample if each.component == name and kind in ("", its_kind)]
        judge(chosen, memory, journal, Workers(jobs), cap, show)
    verdicts = [verdict(its_kind, each, journal.of(each)) for its_kind, each in sample]
    console = Console(width=None if Console().is_terminal else 120)
    for line in [*(closing(verdicts, each) for each in (MUTANTS, INJECTED)), "", table(verdicts), *missed(verdicts)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if page_file:
        page_file.write_text(page(verdicts, count, seed))
        console.print(f"written: {page_file}", highlight=False)
    raise typer.Exit(int(not is_promised(verdicts)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
