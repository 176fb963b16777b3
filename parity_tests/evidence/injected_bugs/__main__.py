"""`python -m parity_tests.evidence.injected_bugs`: inject every bug and count how many are caught; see `make bugs`.

Exit status: 0 if 95 of 100 bugs are caught, else 1. With --page the page docs/injected-bugs.md is written again.
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
  python -m parity_tests.evidence.injected_bugs "entropy"
  python -m parity_tests.evidence.injected_bugs --stale vocab_parallel:
  python -m parity_tests.evidence.injected_bugs vocab_parallel: --examples 10 --json outcomes.json

\b
Exit status:
    0  95 of 100 bugs are caught; with --stale none is stale
    1  fewer are; with --stale at least one is stale
    2  usage: no bug has the pattern, or an option that cannot be used
"""


def main(
    pattern: Annotated[str, typer.Argument(help="Only bugs whose name, kind or symbol contains this.")] = "",
    examples: Annotated[int, typer.Option(min=1, help="Drawn examples of each scheme.")] = 40,
    engine: Annotated[str, typer.Option(help="lockstep, or gloo: the patch travels to the ranks.")] = "lockstep",
    json: Annotated[Path | None, typer.Option(help="Write the outcomes as JSON.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the bugs.")] = 1,
    scheme: Annotated[str, typer.Option(help="Only schemes whose name contains this.")] = "",
    jax_cache: Annotated[str, typer.Option(help="Folder that caches JAX's compiled references.")] = ".jax_cache",
    stale: Annotated[bool, typer.Option("--stale", help="List bugs whose text is no longer in their symbol.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write injected-bugs.md and its figure into this folder.")] = None,
    table: Annotated[Path | None, typer.Option(help="Write a line for each bug into this file, as Markdown.")] = None,
) -> None:
    """Inject every bug of the catalogue in turn and print which oracle catches it, after how many examples.

    First, every scheme is run to find out which lines it runs: several minutes, whatever the pattern. --stale runs
    nothing and takes a second.
    """
    from parity_tests.evidence.injected_bugs.catalogue import CATALOGUE, IN_KERNELS
    from parity_tests.evidence.injected_bugs.injected_bug import stale_bugs
    from shardproof.declare import discover

    bugs = (*CATALOGUE, *IN_KERNELS) if stale else CATALOGUE  # bugs in kernels have a test of their own
    chosen = [bug for bug in bugs if any(pattern in text for text in (bug.name, bug.kind, bug.at))]
    if not chosen:
        raise typer.BadParameter(f"no bug has {pattern!r} in its name, kind or symbol")
    if stale:
        messages = stale_bugs(chosen)
        print("\n".join([*messages, f"{len(messages)} of {len(chosen)} are stale"]))
        raise typer.Exit(int(bool(messages)))
    try:
        discover.find([f"*{scheme}*"])
    except discover.UnusableTarget:
        raise typer.BadParameter(f"no scheme has {scheme!r} in its name", param_hint="--scheme") from None
    from parity_tests.evidence.injected_bugs import report
    from parity_tests.evidence.injected_bugs.processes import Trying, run_in_processes
    from parity_tests.evidence.page import write

    console = Console(width=None if Console().is_terminal else 170)
    outcomes = run_in_processes(jobs, chosen, Trying(examples, engine, jax_cache, scheme))
    console.print(report.table(outcomes))
    for line in report.closing(outcomes, examples):
        console.print(line, highlight=False, soft_wrap=True)
    if json:
        json.write_text(report.as_json(outcomes, examples))
    if page:
        report.write_page(outcomes, examples, page)
    if table:
        write(report.one_by_one(outcomes), table)
    counted = report.counted(outcomes)
    raise typer.Exit(int(sum(outcome.caught for outcome in counted) < PROMISED * len(counted)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
