"""The gallery shows every figure there is, with a line for each."""

import importlib.util
import re

import pytest

from parity_tests.pages import ROOT

spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
assert spec is not None and spec.loader is not None
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_of_a_notebook_has_a_line(notebook):
    assert len(gallery.figures(notebook)) == len(gallery.CAPTIONS.get(notebook.stem, ())) > 0


def test_every_figure_is_written_and_shown(tmp_path):
    gallery.write(tmp_path)
    pictures = re.findall(r"!\[[^]]*\]\(images/gallery/([^)]*)\)", (tmp_path / "gallery.md").read_text())
    assert sorted(pictures) == sorted(path.name for path in (tmp_path / "images" / "gallery").iterdir())


def test_every_picture_of_the_pages_is_in_it():
    pictures = {path.name for path in (ROOT / "docs" / "images").iterdir() if path.suffix in (".png", ".svg")}
    shown = re.findall(r"(?:\]\(|\{image\} )images/([\w.-]+)\)?\n", gallery.page())
    assert sorted(shown) == sorted(pictures)
