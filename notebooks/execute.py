"""Execute the notebooks: `python notebooks/execute.py` writes each numbered script's .ipynb with its outputs.

`python notebooks/execute.py 03 08` does so for these alone.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
PATIENCE = 240  # seconds for one cell, on a machine that does much else


def executed(script: Path) -> Any:
    """The notebook of a script with the outputs of a fresh run, in a folder of its own. Errors: CellExecutionError."""
    notebook = jupytext.read(script)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=PATIENCE, record_timing=False, resources=resources).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # random ids would differ at each run
    return notebook


def sliders(notebook: Any) -> list[int]:
    """The cells with a widget, which are not executed here: a widget needs a running kernel, and its ids are random."""
    tag = NotebookClient.skip_cells_with_tag.default_value
    return [number for number, cell in enumerate(notebook.cells) if tag in cell.metadata.get("tags", ())]


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or ("",)
    for script in (script for script in SCRIPTS if script.stem.startswith(chosen)):
        nbformat.write(executed(script), script.with_suffix(".ipynb"))
