"""The figures of the pages in two themes: `layouts.svg` on a light ground and `layouts-dark.svg` on a dark one.

What draws a figure takes its colours from `colours` and from matplotlib's settings, and the same function draws both.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Text stays text, set by the reader: in DejaVu, or in a font whose letters are as wide. Where neither is, most are
# narrower. The same figure has the same bytes.
WRITTEN: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shardproof",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.monospace": ["DejaVu Sans Mono", "Menlo", "monospace"],
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # what drew it, and when, is no part of a picture
LIGHT, DARK = "light", "dark"


def theme(ground: str, text: str, frame: str) -> dict[str, Any]:
    """matplotlib's settings for a ground, a colour of text and axes, and one of frames and of what is idle."""
    grounds = ("figure.facecolor", "figure.edgecolor", "axes.facecolor", "savefig.facecolor")
    texts = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return dict.fromkeys(grounds, ground) | dict.fromkeys(texts, text) | {"legend.edgecolor": frame}


# The grounds are those of the pages. No colour is black, which an SVG leaves out: the files differ in numbers only.
THEMES = {LIGHT: theme("#ffffff", "#1a1c1e", "#cccccc"), DARK: theme("#131416", "#cfd0d0", "#4a4c50")}


def path_of(light: Path, name: str) -> Path:
    """The file of a theme, by that of the light one."""
    return light if name == LIGHT else light.with_stem(f"{light.stem}-{name}")


def write(draw: Callable[[], Any], path: Path) -> Path:
    """Write what `draw` returns, a matplotlib figure, in both themes; `path` is the light one's, and is returned."""
    from matplotlib import style

    for name, settings in THEMES.items():
        with style.context(["default", WRITTEN | settings]):
            written = io.StringIO()
            draw().savefig(written, format="svg", metadata=NO_METADATA)
        path_of(path, name).write_text(shortened(written.getvalue()))
    return path


def shortened(svg: str) -> str:
    """The same picture to hundredths of a point, without turns by nothing, line breaks in paths and indentation."""
    svg = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"\s*\n", "", path[0]), svg)
    return re.sub(r"\n +", "\n", svg)


def directives(picture: str, alt: str) -> str:
    """Both files on a page of MyST; furo shows the one of the reader's theme."""
    return "".join(
        f"```{{image}} {path_of(Path(picture), name).as_posix()}\n:alt: {alt}\n:class: only-{name}\n```\n"
        for name in THEMES
    )
