"""`python -m parity_tests.faults`: plant every fault, count what is caught; `make faults` calls it.

Exit status: 0 if 95 of 100 faults are killed, else 1. With --page the page docs/faults.md is written anew.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

PROMISED = 0.95


def main(
    pattern: Annotated[str, typer.Argument(help="Only faults whose name, kind or file has this in it.")] = "",
    examples: Annotated[int, typer.Option(min=1, help="Drawn examples of each scheme.")] = 40,
    engine: Annotated[str, typer.Option(help="lockstep, or gloo: the patch travels to the ranks.")] = "lockstep",
    json: Annotated[Path | None, typer.Option(help="Write what was found as JSON.")] = None,
    jax_cache: Annotated[str, typer.Option(help="Folder that keeps JAX's compiled references.")] = ".jax_cache",
    page: Annotated[Path | None, typer.Option(help="Write faults.md and its figure into this folder.")] = None,
) -> None:
    """Plant every fault of the catalogue in turn and say which oracle sees it, after how many examples."""
    from parity_tests.faults import report
    from parity_tests.faults.catalogue import CATALOGUE
    from parity_tests.faults.page import write
    from parity_tests.faults.runner import Outcome, Range, killing_run

    chosen = [fault for fault in CATALOGUE if any(pattern in text for text in (fault.name, fault.kind, fault.file))]
    if not chosen:
        raise typer.BadParameter(f"no fault has {pattern!r} in its name, kind or file")
    console, progress = Console(width=None if Console().is_terminal else 170), Console(stderr=True)

    def show(done: int, outcome: Outcome) -> None:
        if progress.is_terminal:
            progress.print(f"{done}/{len(chosen)} {outcome.fault.name}", end="\r", soft_wrap=True)

    outcomes = killing_run(chosen, Range(examples, engine, cache=jax_cache), show)
    console.print(report.table(outcomes))
    for line in report.closing(outcomes, examples):
        console.print(line, highlight=False, soft_wrap=True)
    if json:
        json.write_text(report.as_json(outcomes, examples))
    if page:
        console.print(f"written: {write(outcomes, examples, page)}")
    those = report.counted(outcomes)
    raise typer.Exit(int(sum(outcome.killed for outcome in those) < PROMISED * len(those)))


if __name__ == "__main__":
    typer.run(main)
