"""The page of the matrix: which cells name rank, operation and line, and the sentence of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import product, starmap
from pathlib import Path

from parity_tests.evidence.failures.cells import ENGINES, OUTSIDE, WORLDS, Cell, bodies
from parity_tests.evidence.failures.commands import COMMANDS
from parity_tests.evidence.page import joined, markdown_table, written_by

ROOT = f"{Path(__file__).resolve().parents[3]}/"
Matrix = Mapping[tuple[str, int], Sequence[Cell]]
HEAD = """# What a failure says

Each row is a kind of failure, each column an engine and its number of ranks. [Read a
failure](how-to/read-a-failure.md) explains the sentences.

A cell is the cause that the sentence begins with. *done*: nothing failed there. *ended*: the process of
the command ended before it could answer. The cause is followed by the parts (rank, operation,
line) that the sentence does not name.

On lockstep the ranks are threads of the command, so that a rank which is killed, or crashes in native code, ends the
command with it: its parent, which waits for it, says where the ranks were. A wrong return value has no operation or
line, so the sentence names only the rank. The last kinds are whole commands, which need a verdict and a status.

{written_by}
It also writes the code of each kind and every sentence that is printed into `build/failures.md`.

{table}
"""


def summary(matrix: Matrix, before: str = "") -> str:
    """The page, as Markdown: the cause of each cell. Cells of the page `before` stay where the matrix has none."""
    cells = _cells_of(before)
    for (engine, world), row in matrix.items():
        cells |= {(_title(cell.kind), _column(engine, world)): _brief(cell) for cell in row}
    named = {column for _, column in cells}
    columns = [column for column in starmap(_column, product(ENGINES, WORLDS)) if column in named]
    kinds = [kind for kind in map(_title, bodies()) if any((kind, column) in cells for column in columns)]
    rows = [(kind, *(cells.get((kind, column), "not run") for column in columns)) for kind in kinds]
    return HEAD.format(written_by=written_by("make failures"), table=markdown_table(("kind", *columns), rows))


def _cells_of(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page by their kind and column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    (_, *columns), *rows = lines or [[""]]
    return {(kind, column): cell for kind, *row in rows for column, cell in zip(columns, row, strict=True)}


def _column(engine: str, world: int) -> str:
    return f"{engine}, {world} ranks"


def sentences(matrix: Matrix) -> str:
    """Each cell's printed sentence, below the code of its kind, as Markdown."""
    parts = ["# What each failure says"]
    for row in _rows(matrix):
        parts += [f"## {_title(row[0].kind)}", _code(row[0].kind)]
        for (engine, world), cell in zip(matrix, row, strict=True):
            parts += [f"{engine}, {world} ranks, after {cell.seconds:.1f} s:"]
            parts += [f"```text\n{_without_folders(cell.sentence)}\n```"]
    return joined(*parts)


def _rows(matrix: Matrix) -> list[tuple[Cell, ...]]:
    return list(zip(*matrix.values(), strict=True))


def _title(kind: str) -> str:
    return kind.replace("_", " ")


def _brief(cell: Cell) -> str:
    return f"{cell.cause}; no {', no '.join(cell.lacks)}" if cell.lacks else cell.cause


def _code(kind: str) -> str:
    return f"```text\n{_source(kind).rstrip()}\n```"


def _source(kind: str) -> str:
    """The lines of a function, or the file of those that are declared outside the ranks."""
    body = bodies()[kind]
    if kind in COMMANDS:
        return "\n".join(f"# {file}\n{text}" for file, text in COMMANDS[kind].files.items())
    if body is not None:
        return inspect.getsource(body)
    from parity_tests.evidence.failures import outside, returned

    return inspect.getsource(outside if kind in OUTSIDE else getattr(returned, kind).fn)


def _without_folders(sentence: str) -> str:
    """Paths below the repository and below the packages, wherever these are."""
    return re.sub(r"[^\s\"]*/site-packages/", "", sentence).replace(ROOT, "")
