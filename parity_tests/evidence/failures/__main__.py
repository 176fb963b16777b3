"""`python -m parity_tests.evidence.failures`: run the failure matrix and print it; `make failures` writes files."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread for each rank

from pathlib import Path
from typing import Annotated

import typer

from parity_tests.evidence.failures.cells import ENGINES, WORLDS, bodies, cells
from parity_tests.evidence.page import write, written_by


def main(
    engine: Annotated[
        list[str] | None, typer.Option(help="gloo, lockstep or torchrun; again for a further one.")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="2 or 4; again for a further number.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="This kind alone; again for a further one.")] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write the page to this file, and its cells beside it as JSON. Cells that do not run stay."),
    ] = None,
    run: Annotated[bool, typer.Option(help="Without it, make the page from the cells that are there.")] = True,
) -> None:
    """Run every kind of failure on every engine; status 1 if a sentence lacks the rank, the operation or the line."""
    for flag, chosen, valid_names in (("engine", engine, ENGINES), ("kind", kind, tuple(bodies()))):
        unknown = [name for name in chosen or () if name not in valid_names]
        if unknown:
            raise typer.BadParameter(f"--{flag} {unknown[0]!r} is not one of {', '.join(valid_names)}")
    from parity_tests.evidence.failures import stored
    from parity_tests.evidence.failures.page import text

    before = None if page is None else stored.read(page.with_suffix(".json"))
    if not run:
        if page is None or before is None:
            raise typer.BadParameter("--no-run needs --page, and the JSON beside it that a run writes")
        write(text(before), page)
        return
    matrix = {
        (name, world): cells(name, world, kind or list(bodies()))
        for name in engine or ENGINES
        for world in ranks or WORLDS
    }
    if page is not None:
        after = stored.with_cells(before, matrix, written_by("make failures"))
        stored.write(after, page.with_suffix(".json"))
        write(text(after), page)
    lacking = 0
    for (name, world), row in matrix.items():
        for cell in row:
            lacking += bool(cell.lacks)
            print(
                f"{name} {world} {cell.kind}: {cell.sentence}"
                + (f"\n  lacks {', '.join(cell.lacks)}" if cell.lacks else "")
            )
    raise typer.Exit(1 if lacking else 0)


if __name__ == "__main__":
    typer.run(main)
