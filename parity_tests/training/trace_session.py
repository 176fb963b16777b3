"""One call of `shardproof trace`: the first step of a run, tensor by tensor, and where it first differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from parity_tests.harness import bridge
from parity_tests.harness.engines.failure import RankFailure
from parity_tests.harness.engines.ranks import ENGINES
from parity_tests.harness.status import EQUAL, FAILED, MISMATCH
from parity_tests.tracing.lines import Line, first
from parity_tests.training import show, traced
from parity_tests.training.run import Run

BEFORE, AFTER = 4, 3  # lines shown around the first that differs


def trace(run: Run, engine: str, path: str | None, is_whole: bool) -> int:
    """Trace, print, and return the exit status. `path` is where the JSON goes; `is_whole` prints every line."""
    if engine not in ENGINES:
        raise ValueError(f"--engine {engine!r} is not one of {', '.join(ENGINES)}")
    console = Console(width=None if Console().is_terminal else show.WIDTH)
    bridge.start()
    known = traced.known_of(run)
    try:
        found = traced.trace(run, known, engine)
    except RankFailure as failure:
        console.print(f"{show.named(run)}: {failure}", style="red", markup=False, highlight=False, soft_wrap=True)
        return FAILED
    if path == "-":
        print(as_json(found))
        return EQUAL if first(found) is None else MISMATCH
    if path:
        with open(path, "w") as file:
            file.write(as_json(found))
    shown = found if is_whole else around(found)
    if shown:
        console.print(table(shown))
    console.print(closing(run, found), style="bold", markup=False, highlight=False, soft_wrap=True)
    return EQUAL if first(found) is None else MISMATCH


def around(found: Sequence[Line]) -> Sequence[Line]:
    """The first line that differs with those about it; none if all is equal."""
    at = next((i for i, line in enumerate(found) if not line.ok), None)
    return [] if at is None else found[max(at - BEFORE, 0) : at + AFTER + 1]


def table(found: Sequence[Line]) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("phase", "tensor", "error", "budget", "of budget", "ranks", "verdict"):
        grid.add_column(column, justify="right" if column in ("error", "budget", "of budget") else "left")
    for line in found:
        ranks, verdict = ", ".join(map(str, line.ranks)), "equal" if line.ok else "[red]DIFFERS[/red]"
        numbers = f"{line.error:.1e}", f"{line.budget:.1e}", f"{line.ratio:.2g}"
        grid.add_row(line.phase, line.name, *numbers, ranks, verdict)
    return grid


def closing(run: Run, found: Sequence[Line]) -> str:
    """One sentence, and a second on what kind of mistake it is."""
    line = first(found)
    if line is None:
        nearest = max(found, key=lambda line: line.ratio)
        return (
            f"{show.named(run)}: {len(found)} tensors as on one device, at most {nearest.ratio:.2g} of the budget "
            f"({nearest.name})."
        )
    ranks = "rank" if len(line.ranks) == 1 else "ranks"
    where = line.home or "the model itself"
    said = (
        f"{show.named(run)}: first to differ: {line.name}, {ranks} {', '.join(map(str, line.ranks))}; look in {where}."
    )
    return said + "".join(f"\n  {note}" for note in line.notes)


def as_json(found: Sequence[Line]) -> str:
    return json.dumps([asdict(line) for line in found], indent=1)
