"""The display of a run: a live table, the final table and sentence, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from shardproof.declare.counted import counted
from shardproof.engines.failure import RankFailure
from shardproof.report.report import number
from shardproof.training.judged import Judged
from shardproof.training.record import GRADIENT, WEIGHT
from shardproof.training.run import Run

SHOWN = 12  # rows of the live table
WIDTH = 150  # columns if the output is not a terminal


class LiveTable:
    """A context with a progress bar and the last steps on a terminal; elsewhere it prints nothing."""

    def __init__(self, run: Run, first: int, quiet: bool) -> None:
        console = Console(stderr=True)
        self._steps: list[Judged] = []
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console)
        self._task = self._bar.add_task(named(run), total=run.steps - first)
        self._live = Live(self._bar, console=console, transient=True) if console.is_terminal and not quiet else None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, step: Judged) -> None:
        self._steps.append(step)
        self._bar.advance(self._task)
        if self._live is not None:
            self._live.update(Group(table(self._steps[-SHOWN:]), self._bar))


def named(run: Run) -> str:
    """A run in one line: `dp_shard=2 cp=2  hidden  ring  float64`, with the schedule if it has several stages."""
    axes = " ".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one rank"
    schedule = f"  {run.rule.name}" if run.is_staged else ""
    more = ("  experts" if run.has_experts else "") + ("  tied" if run.is_tied else "")
    more += "" if run.optimizer == "adamw" else f"  {run.optimizer}"
    more += "" if run.clip is None else f"  clip {run.clip:g}"
    return f"{axes}{schedule}  {run.mamba}  {run.attention}  {run.dtype}{more}"


def table(steps: Sequence[Judged]) -> Table:
    """One line for each step: the two losses, and the largest ratio of error to budget for each kind of number."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("step", "loss", "reference", "error", "norm", "gradients", "weights"):
        grid.add_column(column, justify="right")
    grid.add_column("nearest its budget")
    grid.add_column("verdict")
    for step in steps:
        worst = {kind: step.worst(kind) for kind in (GRADIENT, WEIGHT)}
        nearest = max(step.rows, key=lambda name: step.rows[name].ratio)
        grid.add_row(
            str(step.index + 1),
            f"{step.loss:.10f}",
            f"{step.want:.10f}",
            f"{step.rows['loss'].error:.1e}",
            _share(step.rows["norm"].ratio),
            *(_share(row.ratio) for _, row in worst.values()),
            nearest,
            "equal" if step.ok else "[red]MISMATCH[/red]",
        )
    return grid


def _share(ratio: float) -> str:
    return f"{ratio:.2g}" if math.isfinite(ratio) else "inf"


def closing(run: Run, steps: Sequence[Judged]) -> str:
    """The result of a run in one sentence."""
    first_wrong = next((step for step in steps if not step.ok), None)
    if first_wrong is None:
        worst = max(step.worst_ratio for step in steps)
        return f"{named(run)}: {counted(len(steps), 'step')} as on one device, at most {_share(worst)} of the budget."
    forward = "the loss already differs" if "loss" in first_wrong.wrong else "the loss is equal"
    names = [name for name in first_wrong.wrong if name not in ("loss", "norm")]
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{named(run)}: step {first_wrong.index + 1} is the first to differ; {forward}; wrong: {listed or 'the norm'}."
    )


def as_json(runs: Sequence[tuple[Run, Sequence[Judged] | RankFailure]]) -> str:
    """The runs as JSON, each with its steps, or with the failure of a rank and no steps."""
    return json.dumps([_record(run, steps) for run, steps in runs], indent=1)


def _record(run: Run, outcome: Sequence[Judged] | RankFailure) -> dict[str, Any]:
    failure = outcome if isinstance(outcome, RankFailure) else None
    steps = () if isinstance(outcome, RankFailure) else outcome
    word = "equal" if all(step.ok for step in steps) else "mismatch"
    return {
        "mesh": dict(run.mesh),
        "dtype": run.dtype,
        "mamba": run.mamba,
        "attention": run.attention,
        "schedule": run.rule.name,
        "verdict": word if failure is None else failure.cause,
        "failure": None if failure is None else str(failure),
        "steps": [
            {
                "step": step.index + 1,
                "loss": number(step.loss),
                "reference": step.want,
                "wrong": step.wrong,
                "rows": {name: {"error": number(row.error), "budget": row.budget} for name, row in step.rows.items()},
            }
            for step in steps
        ],
    }
