"""Each figure of the pages has a dark twin with the same text, in which only colours differ; none is stale."""

import importlib.util
import re
from itertools import count
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from parity_tests.pages import ROOT, links, pages
from shardproof.report import colours, themes

IMAGES = ROOT / "docs" / "images"
DARK = {path.name for path in IMAGES.glob("*-dark.svg")}
FIGURES = sorted(path for path in IMAGES.glob("*.svg") if path.name not in DARK)
COLOUR = re.compile(r"#[0-9a-f]{6}\b")
ID = re.compile(r"\b\w*[0-9a-f]{10}\b")  # matplotlib's, a hash of shape and style

spec = importlib.util.spec_from_file_location("images", ROOT / "docs" / "images.py")
assert spec is not None and spec.loader is not None
images = importlib.util.module_from_spec(spec)
spec.loader.exec_module(images)


def dark(path):
    return themes.path_of(path, themes.DARK)


def texts(path):
    """A figure's texts, in its order."""
    elements = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(element.itertext()) for element in elements]


def without_colours(svg):
    """Colours alike, and ids by the order in which they come."""
    numbers, names = count(), {}
    return ID.sub(lambda found: names.setdefault(found[0], f"id-{next(numbers)}"), COLOUR.sub("#", svg))


def example(text="left", at=0.5):
    canvas = Figure(figsize=(2, 2))
    panel = canvas.subplots()
    panel.plot([0, at], [0, 1], **colours.line(0), label=text)
    panel.bar([0], [at], hatch="//")
    panel.legend()
    return canvas


def test_every_figure_has_a_twin_and_no_twin_is_without():
    assert FIGURES and {dark(path).name for path in FIGURES} == DARK


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The pictures that take seconds, as they are drawn now."""
    folder = tmp_path_factory.mktemp("images")
    return {name: themes.write(draw, folder / f"{name}.svg") for name, draw in images.QUICK.items()}


@pytest.mark.parametrize("name", dict.fromkeys([*images.QUICK, *(path.stem for path in FIGURES)]))
def test_both_say_the_same_and_differ_in_colours_only(name, drawn):
    path = drawn.get(name, IMAGES / f"{name}.svg")
    light, twin = path.read_text(), dark(path).read_text()
    assert texts(path) == texts(dark(path)) != []
    assert light != twin and without_colours(light) == without_colours(twin)


def test_another_text_or_length_is_no_difference_of_colours(tmp_path):
    first, text, length = (tmp_path / f"{name}.svg" for name in ("first", "text", "length"))
    for path, settings in ((first, {}), (text, {"text": "right"}), (length, {"at": 0.6})):
        themes.write(lambda settings=settings: example(**settings), path)
        assert without_colours(path.read_text()) == without_colours(dark(path).read_text())
    assert texts(first) != texts(text) and texts(first)[-1] == "left"
    assert len({without_colours(path.read_text()) for path in (first, text, length)}) == 3


def test_the_same_figure_has_the_same_bytes(tmp_path):
    first, second = (themes.write(example, tmp_path / f"{name}.svg") for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes() and dark(first).read_bytes() == dark(second).read_bytes()
    assert "<metadata" not in first.read_text()


def test_the_committed_picture_matches_a_new_one(drawn):
    assert texts(drawn["layouts"]) == texts(IMAGES / "layouts.svg")


@pytest.mark.parametrize("theme", themes.THEMES)
def test_text_can_be_read_on_its_ground_and_so_can_lines_on_a_dark_one(theme):
    settings = themes.THEMES[theme]
    ground = settings["axes.facecolor"]
    assert contrast(settings["text.color"], ground) > 4.5  # WCAG 2, level AA, of text
    if theme == themes.DARK:
        assert min(contrast(colour, ground) for colour in colours.LINES_ON_DARK) > 3  # of graphics


def contrast(*pair):
    low, high = sorted(map(colours.luminance, pair))
    return (high + 0.05) / (low + 0.05)


def test_a_page_shows_both_or_none():
    shown = [(page, link.rpartition("/")[2]) for page in pages() for link in links(page) if "images/" in link]
    on_dark = {(page, name) for page, name in shown if name.endswith("-dark.svg")}
    on_light = {(page, name) for page, name in shown if name.endswith(".svg")} - on_dark
    assert {(page, dark(IMAGES / name).name) for page, name in on_light} == on_dark != set()


def test_a_page_shows_pictures_that_are_committed_or_drawn_with_the_pages():
    shown = {link.rpartition("/")[2] for page in pages() for link in links(page) if "images/" in link}
    drawn_with_the_pages = {f"{name}.svg" for name in images.QUICK}
    committed = {path.name for path in (*FIGURES, *IMAGES.glob("*.png"))}
    assert {name.replace("-dark", "") for name in shown} <= drawn_with_the_pages | committed
