"""`python -m parity_tests.injected_bugs`: plant every fault, count what is caught; `make bugs` calls it.

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
EPILOG = """\b
Examples:
  python -m parity_tests.injected_bugs "entropy"
  python -m parity_tests.injected_bugs --stale vocab_parallel:
  python -m parity_tests.injected_bugs vocab_parallel: --examples 10 --json found.json

\b
Exit status:
    0  95 of 100 faults are killed
    1  fewer are
    2  usage: no fault has the pattern, or an option that cannot be used
"""


def main(
    pattern: Annotated[str, typer.Argument(help="Only faults whose name, kind or symbol has this in it.")] = "",
    examples: Annotated[int, typer.Option(min=1, help="Drawn examples of each scheme.")] = 40,
    engine: Annotated[str, typer.Option(help="lockstep, or gloo: the patch travels to the ranks.")] = "lockstep",
    json: Annotated[Path | None, typer.Option(help="Write what was found as JSON.")] = None,
    jax_cache: Annotated[str, typer.Option(help="Folder that keeps JAX's compiled references.")] = ".jax_cache",
    stale: Annotated[bool, typer.Option("--stale", help="List those whose text production no longer has.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write faults.md and its figure into this folder.")] = None,
) -> None:
    """Plant every fault of the catalogue in turn and say which oracle sees it, after how many examples.

    Before the first, every scheme is run to find which lines it has: several minutes, whatever the pattern.
    """
    from parity_tests.injected_bugs.catalogue import CATALOGUE
    from parity_tests.injected_bugs.catalogue.kernels import BUGS as IN_KERNELS
    from parity_tests.injected_bugs.symbols import stale_bugs

    bugs = (*CATALOGUE, *IN_KERNELS) if stale else CATALOGUE  # those in kernels have a test of their own
    chosen = [fault for fault in bugs if any(pattern in text for text in (fault.name, fault.kind, fault.at))]
    if not chosen:
        raise typer.BadParameter(f"no fault has {pattern!r} in its name, kind or symbol")
    if stale:
        messages = stale_bugs(chosen)
        print("\n".join([*messages, f"{len(messages)} of {len(chosen)} are stale"]))
        raise typer.Exit(int(bool(messages)))
    from parity_tests.injected_bugs import report
    from parity_tests.injected_bugs.page import write
    from parity_tests.injected_bugs.runner import Outcome, Range, killing_run
    from parity_tests.injected_bugs.told import Told, without_warnings_of_schedules

    console, told = Console(width=None if Console().is_terminal else 170), Told(Console(stderr=True))

    def show(done: int, outcome: Outcome) -> None:
        told("fault", done, len(chosen), outcome.fault.name)

    with without_warnings_of_schedules():
        ranges = Range(examples, engine, cache=jax_cache)
        for number, course in enumerate(ranges.courses, 1):
            told("lines of scheme", number, len(ranges.courses), course.scheme.name)
            course.trace()
        outcomes = killing_run(chosen, ranges, show)
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
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
