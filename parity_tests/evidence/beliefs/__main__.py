"""`python -m parity_tests.evidence.beliefs`: judge the wrong beliefs; `make beliefs` writes the page."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """\b
Examples:
  python -m parity_tests.evidence.beliefs pipelining: --without-tests
  python -m parity_tests.evidence.beliefs --page docs/beliefs.md

\b
Exit status:
    0  as many are caught as promised
    1  fewer are, or some are not judged
    2  usage: no belief has the pattern
"""


def main(
    pattern: Annotated[str, typer.Argument(help="Only beliefs whose name, kind or symbol contains this.")] = "",
    own: Annotated[bool, typer.Option("--own", help="Try the schemes of the component's folder alone.")] = False,
    without_tests: Annotated[bool, typer.Option("--without-tests", help="Judge by drawn cases alone.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes of tests at once.")] = 1,
    build: Annotated[Path, typer.Option(help="Where outcomes and reached lines are remembered.")] = Path("build"),
    page: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    jax_cache: Annotated[str, typer.Option(help="Folder that caches JAX's compiled references.")] = ".jax_cache",
) -> None:
    """Judge wrong beliefs by default drawn cases, and survivors by fast tests; print the shares by component.

    A run goes on where one was stopped: the outcomes stand in build/beliefs.jsonl.
    """
    from parity_tests.evidence.beliefs import judge
    from parity_tests.evidence.beliefs import page as pages
    from parity_tests.evidence.beliefs.belief import BELIEFS
    from parity_tests.evidence.journal import Journal
    from parity_tests.evidence.mutants.reached import Memory
    from parity_tests.evidence.page import bullets, joined, write
    from parity_tests.evidence.workers import Workers

    chosen = [each for each in BELIEFS if any(pattern in text for text in (each.name, each.kind, each.at))]
    if not chosen:
        raise typer.BadParameter(f"no belief has {pattern!r} in its name, kind or symbol")
    show = partial(print, file=sys.stderr, flush=True)
    journal, memory = Journal(build / "beliefs.jsonl"), Memory(build / "mutants_lines.jsonl")
    judge.by_drawn_cases(chosen, journal, judge.DrawnJudge(str(Path(jax_cache).resolve()), not own, show))
    if not without_tests:
        judge.by_fast_tests(chosen, memory, journal, Workers(jobs), show)
    verdicts = pages.verdicts(journal, chosen)
    print(joined(bullets(pages.closing(verdicts)), pages.table(verdicts)))
    if page:
        write(pages.text(pages.verdicts(journal)), page)
    raise typer.Exit(int(not pages.is_promised(verdicts)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
    sys.stdout.flush()
