"""Figures for pages in two themes: `layouts.svg` on a light background and `layouts-dark.svg` on a dark one.

The function that draws a figure takes its colours from `colours` and matplotlib's settings, and draws both themes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Text stays text: the reader's browser shows it in DejaVu, or in a font with letters of the same width. Most other
# fonts are narrower. The same figure always has the same bytes.
WRITTEN: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shardproof",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.monospace": ["DejaVu Sans Mono", "Menlo", "monospace"],
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # neither creator nor date belongs to a picture
LIGHT, DARK = "light", "dark"


def theme(ground: str, text: str, frame: str) -> dict[str, Any]:
    """matplotlib's settings for a background, a colour of text and axes, and one of frames and inactive parts."""
    grounds = ("figure.facecolor", "figure.edgecolor", "axes.facecolor", "savefig.facecolor")
    texts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return dict.fromkeys(grounds, ground) | dict.fromkeys(texts, text) | {"legend.edgecolor": frame}


# The backgrounds match the pages. No colour is black, because an SVG omits black: so the files differ only in numbers.
THEMES = {LIGHT: theme("#ffffff", "#1a1c1e", "#cccccc"), DARK: theme("#131416", "#cfd0d0", "#4a4c50")}


def path_of(light: Path, name: str) -> Path:
    """The file of a theme, given the light one's path."""
    return light if name == LIGHT else light.with_stem(f"{light.stem}-{name}")


def write(draw: Callable[[], Any], path: Path) -> Path:
    """Write the matplotlib figure that `draw` returns in both themes; returns `path`, the light one's."""
    from matplotlib import style

    for name, settings in THEMES.items():
        with style.context(["default", WRITTEN | settings]):
            written = io.StringIO()
            draw().savefig(written, format="svg", metadata=NO_METADATA)
        path_of(path, name).write_text(shortened(written.getvalue()), encoding="utf-8")
    return path


def shortened(svg: str) -> str:
    """The same picture to hundredths of a point, without null rotations, line breaks in paths and indentation."""
    svg = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\s*\n", "", path[0]), svg)
    return re.sub(r"\n +", "\n", svg)


def directives(picture: str, alt: str) -> str:
    """Both files in MyST syntax; furo shows the one for the reader's theme."""
    return "".join(
        f"```{{image}} {path_of(Path(picture), name).as_posix()}\n:alt: {alt}\n:class: only-{name}\n```\n"
        for name in THEMES
    )
