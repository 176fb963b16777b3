"""The gallery shows every figure there is, as it is now, and has a line for each."""

import importlib.util

import pytest

from parity_tests.pages import ROOT

spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
assert spec is not None and spec.loader is not None
gallery = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
RENEW = "run `python docs/gallery.py`"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_of_a_notebook_has_a_line(notebook):
    assert len(gallery.figures(notebook)) == len(gallery.CAPTIONS.get(notebook.stem, ())) > 0


def test_the_figures_are_those_of_the_notebooks():
    wanted = gallery.files()
    there = {path: path.read_bytes() for path in gallery.FOLDER.glob("*.png")}
    assert sorted(path.name for path in there) == sorted(path.name for path in wanted)
    assert [path.name for path in wanted if there[path] != wanted[path]] == [], RENEW


def test_the_page_is_what_is_written_now():
    assert gallery.PAGE.read_text() == gallery.page(), RENEW


def test_every_picture_of_the_pages_is_in_it():
    pictures = {path.name for path in (ROOT / "docs" / "images").glob("*.png")}
    assert pictures == {name for name, _, _ in gallery.PICTURES}
