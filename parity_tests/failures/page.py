"""The page of the matrix: which cells name rank, operation and line, and what each says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from parity_tests.failures.cells import Cell, bodies

ROOT = f"{Path(__file__).resolve().parents[2]}/"
Matrix = Mapping[tuple[str, int], Sequence[Cell]]
HEAD = """# What a failure says

Kinds of failure on the engines of the columns, with the sentence that is printed: `make failures` runs them and writes
this page. [Read a failure](how-to/read-a-failure.md) explains the sentences.

A cell is the cause that the sentence begins with. *done*: nothing failed there. *ended*: the process of
the command ended before it could answer; under torchrun a rank that is left says why. After the cause stands what the
sentence does not name of rank, operation and line.

On lockstep the ranks are threads of the command, so that a rank which is killed, or crashes in native code, ends the
command with it: its parent, which waits for it, says where the ranks were. Of a wrong return value the rank is all that
there is to name.
"""


def text(matrix: Matrix) -> str:
    """Markdown of a matrix: cells by engine and number of ranks, all of the same kinds."""
    columns = list(matrix)
    lines = [HEAD]
    lines += [f"| kind | {' | '.join(f'{engine}, {world} ranks' for engine, world in columns)} |"]
    lines += [f"|---{'|---' * len(columns)}|"]
    rows = list(zip(*matrix.values(), strict=True))
    lines += [
        f"| [{_title(row[0].kind)}](#{row[0].kind.replace('_', '-')}) | {' | '.join(map(_brief, row))} |"
        for row in rows
    ]
    for row in rows:
        lines += ["", f"## {_title(row[0].kind)}", "", *_code(row[0].kind)]
        for (engine, world), cell in zip(columns, row, strict=True):
            lines += [
                "",
                f"{engine}, {world} ranks, after {cell.seconds:.1f} s:",
                "",
                "```text",
                _without_folders(cell.sentence),
                "```",
            ]
    return "\n".join(lines) + "\n"


def _title(kind: str) -> str:
    return kind.replace("_", " ")


def _brief(cell: Cell) -> str:
    return f"{cell.cause}; no {', no '.join(cell.lacks)}" if cell.lacks else cell.cause


def _code(kind: str) -> list[str]:
    body = bodies()[kind]
    if body is None:
        from parity_tests.failures import returned

        body = getattr(returned, kind).fn
    return ["```text", inspect.getsource(body).rstrip(), "```"]


def _without_folders(sentence: str) -> str:
    """Paths below the repository and below the packages, wherever these are."""
    return re.sub(r"[^\s\"]*/site-packages/", "", sentence).replace(ROOT, "")
