"""docs/failures.json: the cause, the sentence and the seconds of every cell; the page is made from it."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from parity_tests.evidence.failures.cells import ENGINES, WORLDS, Cell, bodies

Place = tuple[str, int, str]  # engine, number of ranks, kind
PLACES: list[Place] = [(engine, world, kind) for kind, engine, world in product(bodies(), ENGINES, WORLDS)]
ROOT = f"{Path(__file__).resolve().parents[3]}/"
PACKAGES = re.compile(r"[^\s\"]*/(?:site-packages|lib/python3\.\d+)/")
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/\w+/")
# torchrun's own words: its log, and its list of the ranks that ended.
LOG = re.compile(r"^(?:\[rank\d+\]:)?\[?[IWE]\d{4} \d\d:.*\n?", re.MULTILINE)
LIST = re.compile(r"^Traceback \(most recent call last\):\n  File \"<frozen runpy>\".*^=+$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Run:
    """The cells by engine, number of ranks and kind; `written_by` is the line on their origin."""

    written_by: str
    cells: Mapping[Place, Cell]


def with_cells(before: Run | None, matrix: Mapping[tuple[str, int], Sequence[Cell]], written_by: str) -> Run:
    """The run before with the cells of a new one in their places."""
    cells = {} if before is None else dict(before.cells)
    for (engine, world), row in matrix.items():
        for cell in row:
            cells[engine, world, cell.kind] = replace(
                cell, sentence=everywhere(cell.sentence), seconds=round(cell.seconds, 2)
            )
    return Run(written_by, {place: cells[place] for place in PLACES if place in cells})


def everywhere(sentence: str) -> str:
    """A sentence as it reads on every machine: without the folders of this one, and without torchrun's log."""
    ours = LIST.sub("", LOG.sub("", sentence)).strip()
    return TEMPORARY.sub("", PACKAGES.sub("", ours).replace(sys.executable, "python").replace(ROOT, ""))


def read(path: Path) -> Run | None:
    """The run that a file holds, or None if there is no file."""
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    cells = {(each.pop("engine"), each.pop("ranks"), each["kind"]): Cell(**each) for each in record["cells"]}
    return Run(record["written_by"], cells)


def write(run: Run, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"engine": engine, "ranks": world, **asdict(cell)} for (engine, world, _), cell in run.cells.items()]
    lines = ",\n".join(json.dumps(cell, ensure_ascii=False) for cell in cells)  # a line each, for a reader of changes
    path.write_text(f'{{"written_by": {json.dumps(run.written_by)}, "cells": [\n{lines}\n]}}\n')
