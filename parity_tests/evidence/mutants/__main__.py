"""`python -m parity_tests.evidence.mutants`: judge a sample of mutants; `make mutants` writes the page."""

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
  python -m parity_tests.evidence.mutants --count 60
  python -m parity_tests.evidence.mutants --count 20 --component layouts --seed 1

\b
Exit status:
    0  as many are caught as promised
    1  fewer are
    2  usage
"""


def main(
    count: Annotated[int, typer.Option(min=1, help="Mutants, of each component in proportion.")] = 1120,
    seed: Annotated[int, typer.Option(min=0, help="Another number draws others.")] = 0,
    component: Annotated[str, typer.Option(help="Mutants of this folder of torch_impl alone.")] = "",
    examples: Annotated[int, typer.Option(min=1, help="Drawn cases of each scheme.")] = 40,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    folders: Annotated[str, typer.Option(help="all: every test; own: those of the component's folder.")] = "all",
    build: Annotated[Path, typer.Option(help="Where outcomes and reached lines are remembered.")] = Path("build"),
    page: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    jax_cache: Annotated[str, typer.Option(help="Folder that caches JAX's compiled references.")] = ".jax_cache",
) -> None:
    """Judge a sample of mutants by drawn cases and tests, and print how many are caught, by component.

    Before the first, every scheme is run to find which lines it has, and each test when it is first needed.
    """
    if folders not in ("all", "own"):
        raise typer.BadParameter(f"--folders {folders!r} is not all or own")
    from parity_tests.evidence.journal import Journal
    from parity_tests.evidence.mutants import page as pages
    from parity_tests.evidence.mutants import places, reached, run
    from parity_tests.evidence.mutants.outcomes import outcomes as outcomes_of
    from parity_tests.evidence.page import bullets, joined, read, write
    from parity_tests.evidence.workers import Workers

    show = partial(print, file=sys.stderr, flush=True)
    sample = places.sampled(count, seed, component)
    if not sample:
        raise typer.BadParameter(f"--component {component!r}: no folder of torch_impl with mutants")
    memory, journal = reached.Memory(build / "mutants_lines.jsonl"), Journal(build / f"mutants_{examples}.jsonl")
    workers, cache = Workers(jobs), str(Path(jax_cache).resolve())
    schemes = reached.of_schemes(memory, examples, workers, show)
    run.by_drawn_cases(sample, schemes, journal, examples, cache, workers, show)
    run.by_tests(sample, memory, journal, folders, workers, show)
    outcomes = outcomes_of(journal, sample)
    print(joined(bullets(pages.closing(outcomes)), pages.table(outcomes), pages.survivors(outcomes)))
    if page:
        write(pages.text(outcomes, seed, examples, len(places.candidates()), before=read(page)), page)
    raise typer.Exit(int(not pages.is_promised(outcomes)))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog=EPILOG)(main)
    app()
