"""Every notebook runs in under a minute, and the committed one is the script with the outputs of a run."""

import importlib.util
import os
from itertools import groupby
from pathlib import Path

import pytest

from parity_tests.slow import slow_unless

pytest.importorskip("nbclient", reason="needs pip install -e '.[notebooks]' in the clone")
nbformat = pytest.importorskip("nbformat", reason="needs pip install -e '.[notebooks]' in the clone")
jupytext = pytest.importorskip("jupytext", reason="needs pip install -e '.[notebooks]' in the clone")

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60  # of processor time; where nothing else runs, a notebook takes about as long


def loaded(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = loaded(ROOT / "notebooks" / "execute.py")


def cpu_seconds():
    """CPU time of ended child processes: other work on the machine does not lengthen it."""
    times = os.times()
    return times.children_user + times.children_system


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def kinds(notebook):
    """The kinds of each cell's outputs: text, figures, pages. A stream may come in any number of pieces."""
    cells = [
        [tuple(sorted(output.get("data", {"text": ""}))) for output in cell.get("outputs", [])]
        for cell in notebook.cells
    ]
    return [[kind for kind, _ in groupby(cell)] for cell in cells]


FAST = ("01_layouts_by_eye", "08_write_your_own_scheme")  # `make two-notebooks` executes these


@pytest.mark.parametrize(
    "script", slow_unless(lambda script: script.stem in FAST, execute.SCRIPTS), ids=lambda script: script.stem
)
def test_a_notebook_runs_and_is_committed_as_it_runs(script):
    start = cpu_seconds()
    fresh = execute.executed(script)
    assert cpu_seconds() - start < SECONDS
    committed = jupytext.read(script.with_suffix(".ipynb"))
    assert sources(committed) == sources(fresh)
    assert kinds(committed) == kinds(fresh)


@pytest.mark.parametrize("script", execute.SCRIPTS, ids=lambda script: script.stem)
def test_committed_notebooks_have_no_warning(script):
    """Nothing on standard error, and no cell that stopped."""
    outputs = [
        output for cell in jupytext.read(script.with_suffix(".ipynb")).cells for output in cell.get("outputs", [])
    ]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}


SLIDERS = [(script, index) for script in execute.SCRIPTS for index in execute.sliders(jupytext.read(script))]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "index"), SLIDERS, ids=lambda value: getattr(value, "stem", value))
def test_a_slider_draws_each_of_its_values_where_a_reader_runs_it(script, index, tmp_path):
    """The committed notebook has no slider output: a running kernel draws a widget, and its ids differ each time."""
    pytest.importorskip("ipywidgets", reason="needs pip install -e '.[notebooks]' in the clone")
    notebook = jupytext.read(script)
    draw = nbformat.v4.new_code_cell("for value in slider.options:\n    slider.value = value\n    squares(value)")
    notebook.cells = [*notebook.cells[: index + 1], draw]
    execute.NotebookClient(
        notebook, timeout=execute.PATIENCE, skip_cells_with_tag="", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output.data for output in notebook.cells[index].outputs if "data" in output]
    assert any("application/vnd.jupyter.widget-view+json" in data for data in shown)
    figures = [output for output in notebook.cells[-1].outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 4
    committed = jupytext.read(script.with_suffix(".ipynb")).cells[index]
    assert committed.outputs == [] and "widgets" not in jupytext.read(script.with_suffix(".ipynb")).metadata


def test_they_are_numbered_from_one_on():
    numbers = [int(script.stem.partition("_")[0]) for script in execute.SCRIPTS]
    assert numbers and numbers == list(range(1, len(numbers) + 1))
