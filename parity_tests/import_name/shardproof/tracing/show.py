"""Reports of traces: a table and a sentence for each, and one JSON for all."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from shardproof.declare.counted import counted
from shardproof.endings.exit_status import EQUAL, MISMATCH, RANK_FAILED
from shardproof.engines.failure import RankFailure
from shardproof.report.out_path import write_text
from shardproof.report.report import number
from shardproof.report.sentence import Sentence, is_broken
from shardproof.tracing.comparison import Line, first

INNER = "inside a module, where other tokens may be held"
BEFORE, AFTER = 4, 3  # lines shown around the first difference
WIDTH = 150  # without a terminal


@dataclass(frozen=True)
class TraceReport:
    """One trace: its name, its reference (`on one device`), and its lines or a rank's failure.

    `torch_names` maps module names in `lines` to PyTorch's where they differ; `torch_only` and `flax_only` are modules
    that only one side calls. `sums` are tensors that the ranks hold as terms of a sum.
    """

    name: str
    like: str
    lines: Sequence[Line] = ()
    failure: RankFailure | None = None
    torch_names: Mapping[str, str] = field(default_factory=dict)
    torch_only: Sequence[str] = ()
    flax_only: Sequence[str] = ()
    sides: tuple[str, str] = ("PyTorch", "flax")  # the two sides of torch_only and flax_only
    sums: Sequence[str] = ()
    inner: Sequence[str] = ()  # tensors that match none of the other side, or whose difference stays inside

    @property
    def status(self) -> int:
        if self.failure is not None:
            return RANK_FAILED
        return EQUAL if first(self.lines) is None else MISMATCH


def print_report(console: Console, report: TraceReport, is_whole: bool, quiet: bool) -> None:
    """The lines around the first difference, or all; then a sentence, and one about modules that were not compared.

    `quiet`: only the first line of the sentence.
    """
    shown_lines = report.lines if is_whole else around(report.lines)
    if shown_lines and not quiet:
        console.print(table(shown_lines))
    style = "bold" if report.failure is None else "red"
    sentences = [closing(report).partition("\n")[0]] if quiet else [closing(report), *asides(report)]
    for text in sentences:
        console.print(Sentence(text, style), soft_wrap=True)
        style = ""


def console(json: str | None) -> Console:
    """The table's console: standard error if standard output carries JSON."""
    text_to_stderr = json == "-"
    return Console(stderr=text_to_stderr, width=None if is_broken(Console(stderr=text_to_stderr)) else WIDTH)


def write(reports: Sequence[TraceReport], json: str | None) -> int:
    """Write the JSON if asked for; returns the worst exit status of all."""
    status = max(report.status for report in reports)
    text = json_module.dumps({"status": status, "traces": [record(report) for report in reports]}, indent=1)
    if json:
        write_text(json, text)
    return status


def around(lines: Sequence[Line]) -> Sequence[Line]:
    """The first line that differs, with its neighbours; empty if all are equal."""
    at = next((i for i, line in enumerate(lines) if not line.ok), None)
    return [] if at is None else lines[max(at - BEFORE, 0) : at + AFTER + 1]


def table(lines: Sequence[Line]) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("phase", "tensor", "error", "budget", "of budget", "ranks", "verdict"):
        grid.add_column(column, justify="right" if column in ("error", "budget", "of budget") else "left")
    for line in lines:
        ranks, verdict = ", ".join(map(str, line.ranks)), "equal" if line.ok else "[red]DIFFERS[/red]"
        numbers = f"{line.error:.1e}", f"{line.budget:.1e}", f"{line.ratio:.2g}"
        grid.add_row(line.phase, line.name, *numbers, ranks, verdict)
    return grid


def closing(report: TraceReport) -> str:
    """One sentence, and one line for each finding on the kind of mistake."""
    if report.failure is not None:
        return f"{report.name}: {report.failure}"
    line = first(report.lines)
    if line is None:
        nearest = max(report.lines, key=lambda line: line.ratio)
        return (
            f"{report.name}: {counted(len(report.lines), 'tensor')} as {report.like}, "
            f"at most {nearest.ratio:.2g} of the budget ({nearest.name})."
        )
    ranks = f"{'rank' if len(line.ranks) == 1 else 'ranks'} {', '.join(map(str, line.ranks))}"
    sentence = f"{report.name}: first to differ: {line.name}, {ranks}; look in {_home(report, line)}."
    return sentence + "".join(f"\n  {note}" for note in line.notes)


def asides(report: TraceReport) -> list[str]:
    """Modules that were not compared because only one side has them, and tensors compared as a sum."""
    sides = zip(report.sides, (report.torch_only, report.flax_only), strict=True)
    alone = [f"  not compared, {INNER}: {', '.join(report.inner)}"] if report.inner else []
    alone += [f"  not compared, called by {side} alone: {', '.join(names)}" for side, names in sides if names]
    sums = report.sums if first(report.lines) is None else ()  # a wrong tensor may be near a sum by chance
    return alone + [f"  compared as a sum: {text}" for text in sums]


def record(report: TraceReport) -> dict[str, Any]:
    """A trace as JSON; an infinite error is written as text."""
    line = first(report.lines)
    return {
        "name": report.name,
        "verdict": report.failure.cause if report.failure else "equal" if line is None else "mismatch",
        "first": None if line is None else line.name,
        "home": None if line is None else line.home,
        "failure": None if report.failure is None else str(report.failure),
        "torch_only": list(report.torch_only),
        "flax_only": list(report.flax_only),
        "sums": list(report.sums),
        "inner": list(report.inner),
        "lines": [_line(each) for each in report.lines],
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "tensor": line.name,
        "phase": line.phase,
        "home": line.home,
        "error": number(line.error),
        "budget": line.budget,
        "ranks": list(line.ranks),
        "notes": list(line.notes),
    }


def _home(report: TraceReport, line: Line) -> str:
    if not line.home:
        return "the model itself"
    other = report.torch_names.get(line.home)
    return f"{other} ({line.home} in flax)" if other else line.home
