"""docs/benchmarks.md, made from docs/benchmarks.json: the promises, the missed ones, and the comparisons."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from parity_tests.evidence.benchmarks.cells import NUMBER, cells_of, plain
from parity_tests.evidence.benchmarks.figure import Figure
from parity_tests.evidence.benchmarks.reasons import reason
from parity_tests.evidence.benchmarks.stored import Run, Section
from parity_tests.evidence.benchmarks.words import PROMISED
from parity_tests.evidence.page import anchor, joined, markdown_table, versions

HEAD = """# Benchmarks

Shardproof promises {promised} figures: {kept} are kept, and [{missed} are missed](#missed). The harness promises
absolute times on the machine below. The functions promise a ratio to the time of other code for the same work, such
as megatron-core or plain torch: [each promise, and against whom](#what-is-promised-and-against-whom).{open}

{on}"""
OPEN = """ {count} more
cannot be judged by this run, which tries too little. [Injected bugs](injected-bugs.md) and [false
alarms](false-alarms.md) have runs of all."""
READING = """## How to read and repeat it

Both sides of a ratio run in turn, so that the machine's load affects both; an absolute time is for this machine alone.
A figure is a median; its spread, conditions and profile stand in [benchmarks.json](benchmarks.json). An error is a
multiple of the [budget](concepts/tolerance-and-budget.md) that rounding has; above 1 it is a mistake.
[Peers](peers.md) says what the other projects are for. `make bench` measures all figures, and `python -m
parity_tests.evidence.benchmarks --only` one section, whose date then stands there."""
PROMISES = "## What is promised, and against whom"
DASH = "A dash: the promise is an absolute number, and no other code is timed beside it."
# The peer in a figure's name or promise.
AGAINST = re.compile(r"(?:\bover|\btimes(?: faster than)?|% of the) ([A-Za-z].*?)(?:,|$)")
CHART = "logprob, bfloat16"  # the rows of the chart
CHART_HEAD = """## Log-probability, ours and others

CPU time of `vocab_parallel_logprob` (ours) and of other code, forward and backward unless a row says otherwise:
{conditions}; shorter is better. Times and ratios are each a median of the rounds. {wide}"""
MISSED = """## Missed

The farthest from its promise comes first."""
SIZE = re.compile(r"\w+=")  # the size of a dim, whose name stays as it is
NO_BREAK = "\N{NO-BREAK SPACE}"
BAR = 16  # characters of the longest bar, which fit beside names and times on a phone
EIGHTHS = ("", *"▏▎▍▌▋▊▉")
ARM = re.compile(r"^(?P<group>[^:]+): (?P<name>ours.*|.+)$")


def machine() -> str:
    """The machine and versions of the measurements, in one sentence."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{date.today()}: {_processor()}, {os.cpu_count()} cores, {platform.system()}; "
        f"{versions('torch', 'jax', 'numpy', 'hypothesis')}. "
        f"Load average at the start over 1, 5 and 15 minutes: {load}."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def text(run: Run) -> str:
    """The text of the page."""
    figures = [figure for section in run.sections for figure in section.figures]
    missed = [(section, figure) for section in run.sections for figure in section.figures if figure.is_met is False]
    count = {is_met: sum(figure.is_met is is_met for figure in figures) for is_met in (True, False)}
    head = HEAD.format(
        kept=count[True],
        missed=count[False],
        promised=sum(count.values()),
        open=OPEN.format(count=still_open) if (still_open := sum(figure.is_open for figure in figures)) else "",
        on=run.on,
    )
    sections = (
        joined(f"## {section.title}", _measured_separately(section, run.on), *_tables(section))
        for section in run.sections
    )
    parts = (_chart(figures), _promises(run.sections), _missed(missed), READING, *sections)
    return joined(head, *parts, f"The run took {run.seconds:.0f} s.")


def _measured_separately(section: Section, on: str) -> str:
    """When and where a section was measured separately; machine and versions only if they differ from the run's."""
    if not section.on:
        return ""
    (day, there), (_, here) = (each.split(": ", 1) for each in (section.on, on))
    (machine, load), of_run = there.rsplit(". ", 1), here.rsplit(". ", 1)[0]
    return f"Measured separately, {day}: {'machine and versions as above' if machine == of_run else machine}. {load}"


def _promises(sections: Sequence[Section]) -> str:
    """A row for each section: who it is compared with, and how many of its promises are kept."""
    rows = [
        (
            ": ".join((f"[{section.title}](#{anchor(section.title)})", *_in_words(section))),
            _peers(section),
            *(str(sum(figure.is_met is is_met for figure in promised)) for is_met in (True, False, None)),
        )
        for section in sections
        if (promised := [figure for figure in section.figures if figure.is_met is not None or figure.is_open])
    ]
    columns = ("part", "against", "kept", "missed", "too little tried")
    return joined(PROMISES, DASH, markdown_table(columns, rows)) if rows else ""


def _in_words(section: Section) -> Iterator[str]:
    if section.title in PROMISED:
        yield PROMISED[section.title]


def _peers(section: Section) -> str:
    promised = [figure for figure in section.figures if figure.is_met is not None]
    named = [found[1] for figure in promised for found in map(AGAINST.search, (figure.name, figure.promised)) if found]
    return ", ".join(dict.fromkeys(name for name in named if name != "ours")) or "-"


def _missed(missed: Sequence[tuple[Section, Figure]]) -> str:
    rows = [
        (
            f"[{figure.name}](#{anchor(section.title)})",
            figure.promised,
            cells_of(figure).value,
            _missed_by(figure),
            reason(figure, section),
        )
        for section, figure in sorted(missed, key=lambda each: -_miss(each[1]))
    ]
    columns = ("figure", "promised", "measured", "missed by", "where the time goes")
    return joined(MISSED, markdown_table(columns, rows)) if rows else ""


def _missed_by(figure: Figure) -> str:
    miss = _miss(figure)
    return f"{miss:.2f} times" if miss >= 1.01 else "less than 1.01 times"


def _miss(figure: Figure) -> float:
    """How many times a missed figure is larger or smaller than its promise."""
    promised, measured = (_value(text) for text in (figure.promised, cells_of(figure).value))
    return max(promised / measured, measured / promised)


def _value(text: str) -> float:
    """The first number in the text; a percentage is divided by 100."""
    found = re.search(rf"({NUMBER})(%?)", text.replace(",", ""))
    return float(found[1]) / (100 if found[2] else 1) if found else math.nan


@dataclass(frozen=True)
class Arm:
    """One of several implementations of the same work; `group` names the work."""

    group: str
    name: str
    figure: Figure

    def part(self, pattern: str) -> str:
        """The text that the pattern's group finds in the measured text; empty if there is none."""
        found = re.search(pattern, plain(self.figure.measured))
        return found[1] if found else ""

    @property
    def milliseconds(self) -> float:
        return float(self.part(r"([\d.,]+) ms CPU").replace(",", "") or "nan")


def _arms(figures: Sequence[Figure]) -> list[Arm]:
    """The figures that measure a single implementation; they have its CPU time."""
    arms = [Arm(found["group"], found["name"], figure) for figure in figures if (found := ARM.match(figure.name))]
    return [arm for arm in arms if " ms CPU" in arm.figure.measured]


def _chart(figures: Sequence[Figure]) -> str:
    """A bar for each implementation, the fastest first."""
    arms = sorted((arm for arm in _arms(figures) if arm.group == CHART), key=lambda arm: arm.milliseconds)
    if not arms:
        return ""
    longest = arms[-1].milliseconds
    rows = [
        (
            arm.name,
            f"{arm.milliseconds:,.0f}{NO_BREAK}ms",
            arm.part(r"([\d.]+) times ours") or "1",
            _bar(arm.milliseconds / longest),
        )
        for arm in arms
    ]
    head = CHART_HEAD.format(conditions=arms[0].figure.how.partition("; ")[0], wide=_in_float32(figures, arms))
    return joined(head, markdown_table(("implementation", "CPU time", "times ours", ""), rows))


def _in_float32(figures: Sequence[Figure], arms: Sequence[Arm]) -> str:
    """The fastest other code beside ours in float32, where it may be nearer."""
    times = {arm.name: arm.milliseconds for arm in _arms(figures) if arm.group == CHART.replace("bfloat16", "float32")}
    others = (arm.name for arm in arms if not arm.name.startswith("ours") and arm.name in times)
    return next((f"In float32 {name} takes {times[name] / times['ours']:.2g} times our time." for name in others), "")


def _bar(part: float) -> str:
    """A bar of this part of the longest one, in eighths of a character."""
    whole, eighths = divmod(max(round(8 * BAR * part), 1), 8)
    return "\N{FULL BLOCK}" * whole + EIGHTHS[eighths]


def _conditions(figures: Sequence[Figure]) -> str:
    """The clauses with which the conditions of all figures begin."""
    hows = [figure.how.split("; ") for figure in figures if figure.how]
    shared = [clauses[0] for clauses in zip(*hows, strict=False) if len(set(clauses)) == 1]
    return "; ".join(clause for clause in shared if clause != "median (least to greatest)")


def _tables(section: Section) -> Iterator[str]:
    """First the figures, then for each piece of work its implementations; conditions that all share stand above."""
    arms = _arms(section.figures)
    arm_figures = [arm.figure for arm in arms]
    yield from _table([figure for figure in section.figures if figure not in arm_figures])
    for group in dict.fromkeys(arm.group for arm in arms):
        group_arms = [arm for arm in arms if arm.group == group]
        yield f"**{group}**: {_conditions([arm.figure for arm in group_arms])}."
        yield markdown_table(
            (
                "implementation",
                "CPU time",
                "times ours",
                "memory",
                "collectives",
                "bytes of a rank",
                "error, budgets",
                "",
            ),
            [_arm_row(arm) for arm in group_arms],
        )


def _arm_row(arm: Arm) -> tuple[str, ...]:
    collectives = arm.part(r"; (no collective|[^;]*), \d[\d,]* bytes per rank") or "not seen"
    return (
        arm.name,
        f"{arm.milliseconds:,.0f} ms",
        arm.part(r"([\d.]+) times ours") or "1",
        arm.part(r"; memory ([\d.]+)") or "not seen",
        collectives,
        arm.part(r", (\d+) bytes per rank"),
        arm.part(r"^error ([\d.e-]+) budgets"),
        _mark(arm.figure),
    )


def _mark(figure: Figure) -> str:
    return "**missed**" if figure.is_met is False else figure.verdict


def _table(figures: Sequence[Figure]) -> Iterator[str]:
    if not figures:
        return
    if shared := _conditions(figures):
        yield f"{shared if SIZE.match(shared) else shared[0].upper() + shared[1:]}."
    cells = [cells_of(figure) for figure in figures]
    ours = "ours" if any(each.peer for each in cells) else "also"
    columns = {
        "figure": [figure.name for figure in figures],
        ours: [each.ours for each in cells],
        "beside": [each.peer for each in cells],
        "measured": [each.value for each in cells],
        "promised": [figure.promised for figure in figures],
        "": [_mark(figure) for figure in figures],
    }
    shown = {name: column for name, column in columns.items() if any(column)}
    yield markdown_table(tuple(shown), list(zip(*shown.values(), strict=True)))
