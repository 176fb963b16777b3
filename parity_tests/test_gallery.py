"""The gallery shows every figure there is, with a line for each."""

import importlib.util
import re
from pathlib import Path

import pytest

from parity_tests.pages import ROOT
from shardproof.report import themes


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery, images = loaded("gallery"), loaded("images")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_of_a_notebook_has_a_line(notebook):
    assert len(gallery.figures(notebook)) == len(gallery.CAPTIONS.get(notebook.stem, ())) > 0


def test_every_figure_is_written_and_shown(tmp_path):
    gallery.write(tmp_path)
    pictures = re.findall(r"!\[[^]]*\]\(images/gallery/([^)]*)\)", (tmp_path / "gallery.md").read_text())
    assert sorted(pictures) == sorted(path.name for path in (tmp_path / "images" / "gallery").iterdir())


def test_every_picture_of_the_pages_is_in_it():
    committed = {path.name for path in (ROOT / "docs" / "images").iterdir() if path.suffix in (".png", ".svg")}
    drawn = {path.name for name in images.ALL for path in twins(f"{name}.svg")}
    listed = [
        path.name for name, *_ in gallery.PICTURES for path in ([Path(name)] if name == "training.png" else twins(name))
    ]
    assert sorted(listed) == sorted(committed | drawn)


def twins(name):
    return [themes.path_of(Path(name), theme) for theme in themes.THEMES]


def test_a_picture_is_shown_if_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    assert "images/" not in gallery.shown("tour.svg", "caption")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for path in twins("tour.svg"):
        (tmp_path / "docs" / "images" / path).touch()
    assert re.findall(r"images/(\S+)", gallery.shown("tour.svg", "caption")) == [
        path.name for path in twins("tour.svg")
    ]
