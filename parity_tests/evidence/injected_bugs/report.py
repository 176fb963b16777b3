"""The report of a run over injected bugs: progress, one line for each bug, closing figures, the page, JSON."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parity_tests.evidence.injected_bugs.catalogue import WITHOUT_A_COMPONENT
from parity_tests.evidence.injected_bugs.runner import NOT_TRIED, Outcome
from parity_tests.evidence.page import bullets, by_component, markdown_table, share, tables, write, written_by
from shardproof.report import colours, themes

COLUMNS = ("bug", "kind", "caught by", "scheme", "examples", "values alone", "words", "one shape", "all oracles")
SUMMARY = ("component", "bugs", "caught", "by values alone", "by one shape", "median examples", "most examples")
CAUGHT, SURVIVED, EQUIVALENT = "caught", "SURVIVED", "equivalent"
PROGRESS_S = 10.0  # between two lines that stay
SCHEDULE_LOGGER = "torch_impl.pipelining.schedule"  # warns of few micro-batches, which many drawn cases have

HEAD = """# Injected bugs

A test suite is worth what it catches. `parity_tests/evidence/injected_bugs/` is a catalogue of bugs, written by hand,
that are injected one at a time into our own components, in memory; the tree is never written. An oracle should
catch each bug, and report it in the right words, on the drawn examples that the parity tests judge; surviving bugs are
listed. Every fourth example runs inside sub-groups of a larger world.

The page compares this with a typical test: two ranks, one shape, equal shards, float32, three seeds, the same budgets.
*By one shape* counts the bugs that the typical test catches by values or failed ranks; *by values alone* counts the
bugs that drawn examples catch without the oracles of protocol, cost and hygiene. *Examples* is the number of drawn
examples of the scheme until a bug is caught.

{written_by}
It also writes a line for each bug into `build/injected_bugs.md`.

{figure}
{closing}

## By component

Equivalent bugs are not counted.

{summary}
"""


class Progress:
    """Prints the progress of a run on standard error: one line that is overwritten on a terminal, else a few lines."""

    def __init__(self, console: Console, every_s: float = PROGRESS_S) -> None:
        self.console, self.every_s = console, every_s
        self.last = -every_s

    def __call__(self, activity: str, done: int, total: int, name: str) -> None:
        """The first and the last are always printed."""
        line, now = f"{activity} {done}/{total} {name}", time.monotonic()
        if self.console.is_terminal:
            self.console.print(line.ljust(self.console.width - 1)[: self.console.width - 1], end="\r", highlight=False)
        elif done in (1, total) or now - self.last >= self.every_s:
            self.last = now
            self.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def without_schedule_warnings() -> Iterator[None]:
    """Silence warnings on few micro-batches: these schedules are drawn, not chosen by a user."""
    logger = logging.getLogger(SCHEDULE_LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line for each bug."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in COLUMNS:
        grid.add_column(column, no_wrap=True, justify="right" if column in ("examples", "values alone") else "left")
    for outcome in outcomes:
        survived = not outcome.caught and not outcome.bug.equivalent
        grid.add_row(*cells(outcome), style="red" if survived else "dim" if outcome.bug.equivalent else "")
    return grid


def cells(outcome: Outcome) -> tuple[str, ...]:
    """The cells of a bug's line, in the order of COLUMNS."""
    first = outcome.catches[0] if outcome.catches else None
    return (
        outcome.bug.name,
        outcome.bug.kind,
        ", ".join(first.oracles) if first else EQUIVALENT if outcome.bug.equivalent else SURVIVED,
        first.scheme if first else "-",
        str(outcome.examples or "-"),
        str(outcome.examples_by_value or "-"),
        {"first": "right", "later": "right", None: "-"}.get(outcome.note, "wrong"),
        CAUGHT if outcome.baseline else "-",
        CAUGHT if outcome.baseline_all_oracles else "-",
    )


def counted(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of bugs that change something observable."""
    return [outcome for outcome in outcomes if not outcome.bug.equivalent]


def closing(outcomes: Sequence[Outcome], examples: int) -> list[str]:
    """The figures, in sentences."""
    observable = counted(outcomes)
    caught = [outcome for outcome in observable if outcome.caught]
    total = len(observable)
    by_value = sum(outcome.examples_by_value is not None for outcome in observable)
    worded = [outcome for outcome in caught if outcome.bug.expect.partition(":")[2].strip()]
    unworded = [outcome for outcome in caught if outcome not in worded]
    needed = sorted(outcome.examples or 0 for outcome in caught)
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines = [
        f"{share(len(caught), total)} caught within {examples} drawn examples of each affected scheme; "
        f"median {median(needed)}, most {max(needed, default=0)} examples; {seconds:.0f} s.",
        f"{share(by_value, total)} by values or failed ranks alone, without the oracles of protocol, cost and hygiene.",
        f"{share(sum(outcome.baseline for outcome in observable), total)} by a test of one shape on two ranks, "
        f"three seeds; "
        f"{share(sum(outcome.baseline_all_oracles for outcome in observable), total)} where it has all oracles.",
        f"{share(sum(o.note != 'wrong' for o in worded), len(worded))} of the caught for which the catalogue states "
        f"words are reported in these words, {sum(o.note == 'first' for o in worded)} by the very first report.",
        f"{share(sum(o.note != 'wrong' for o in unworded), len(unworded))} of the other caught are seen by the "
        "oracle that the catalogue names.",
    ]
    lines += [
        f"survived: {outcome.bug.name}: {outcome.bug.survives or 'NOT EXPLAINED'}"
        for outcome in observable
        if not outcome.caught
    ]
    lines += [f"equivalent: {o.bug.name}: {o.bug.equivalent}" for o in outcomes if o.bug.equivalent]
    lines += [f"caught although equivalent: {o.bug.name}" for o in outcomes if o.bug.equivalent and o.caught]
    lines += [f"caught although expected to survive: {o.bug.name}" for o in observable if o.bug.survives and o.caught]
    lines += [f"reported otherwise than expected: {o.bug.name}" for o in observable if o.note == "wrong"]
    lines += [f"not tried on {name}: {reason}" for name, reason in NOT_TRIED.items()]
    return lines + [f"no bugs of kind {kind}: {reason}" for kind, reason in WITHOUT_A_COMPONENT.items()]


def median(ordered: Sequence[int]) -> int:
    return ordered[len(ordered) // 2] if ordered else 0


def curve(outcomes: Sequence[Outcome], examples: int, by_value: bool = False) -> list[float]:
    """Share of the bugs caught within 1, 2, ... examples."""
    observable = counted(outcomes)
    needed = [o.examples_by_value if by_value else o.examples for o in observable]
    return [sum(n is not None and n <= i for n in needed) / max(len(observable), 1) for i in range(1, examples + 1)]


def as_json(outcomes: Sequence[Outcome], examples: int) -> str:
    records: list[dict[str, Any]] = [
        {
            **dict(zip(COLUMNS, cells(outcome), strict=True)),
            "expect": outcome.bug.expect,
            "report": outcome.catches[0].words if outcome.catches else None,
            "judged": outcome.judged,
            "source": outcome.bug.source,
            "equivalent": outcome.bug.equivalent,
        }
        for outcome in outcomes
    ]
    return json.dumps({"examples": examples, "closing": closing(outcomes, examples), "bugs": records}, indent=2)


def write_page(outcomes: Sequence[Outcome], examples: int, folder: Path) -> None:
    """Write injected-bugs.md, the summary, and its figures into a folder."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    picture = themes.write(lambda: figure(outcomes, examples), folder / "images" / "injected_bugs.svg")
    shown = themes.directives(f"images/{picture.name}", "Share of bugs caught by number of drawn examples")
    text = HEAD.format(
        written_by=written_by("make bugs", "hypothesis"),
        figure=shown,
        closing=bullets(closing(outcomes, examples)),
        summary=summary([(outcome.bug.component, cells(outcome)) for outcome in outcomes]),
    )
    write(text, folder / "injected-bugs.md")


def summary(rows: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """A table of one line for each component, from (component, cells) of each bug."""
    lines = []
    for component, group in by_component(rows, lambda row: row[0]):
        records = [dict(zip(COLUMNS, row, strict=True)) for _, row in group]
        records = [record for record in records if record["caught by"] != EQUIVALENT]
        needed = sorted(int(record["examples"]) for record in records if record["caught by"] != SURVIVED)
        by_value = sum(record["values alone"] != "-" for record in records)
        by_one_shape = sum(record["one shape"] == CAUGHT for record in records)
        figures = (len(records), len(needed), by_value, by_one_shape, median(needed), max(needed, default=0))
        lines.append((component, *map(str, figures)))
    return markdown_table(SUMMARY, lines)


def one_by_one(outcomes: Sequence[Outcome]) -> str:
    """A line for every bug, in a table for each component."""
    rows = ((outcome.bug.component, _with_source(outcome)) for outcome in outcomes)
    return tables("Injected bugs, one by one", COLUMNS, rows)


def figure(outcomes: Sequence[Outcome], examples: int) -> Any:
    """A curve of the share of bugs caught within each number of examples, and the two baselines as lines."""
    from matplotlib.figure import Figure

    observable = counted(outcomes)
    canvas = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = canvas.subplots()
    at = range(1, examples + 1)
    axes.step(
        at, curve(outcomes, examples), where="post", color=colours.lines()[0], label="drawn examples, four oracles"
    )
    alone = curve(outcomes, examples, by_value=True)
    axes.step(at, alone, where="post", color=colours.lines()[1], label="drawn examples, values alone")
    for name, attribute, style in (
        ("one shape, four oracles", "baseline_all_oracles", "--"),
        ("one shape, values alone", "baseline", ":"),
    ):
        height = sum(getattr(outcome, attribute) for outcome in observable) / max(len(observable), 1)
        axes.axhline(height, linestyle=style, color="gray", label=f"{name}, three seeds")
    axes.set(xlabel="drawn examples of each scheme", ylabel="share of bugs caught", ylim=(0, 1.03), xlim=(1, examples))
    axes.legend(loc="lower right", fontsize="small")
    return canvas


def _with_source(outcome: Outcome) -> tuple[str, ...]:
    name, *rest = cells(outcome)
    return (f"{name} ({outcome.bug.source})" if outcome.bug.source else name, *rest)
