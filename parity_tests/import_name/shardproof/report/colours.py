"""Colours of all figures: one for each rank, wherever it is drawn; and matrices of ranks as coloured cells.

A rank has the same colour on every background. Lines, greys and text follow matplotlib's `axes.facecolor` and
`text.color`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Okabe and Ito's colours, with grey for their black, ordered so that neighbouring ranks differ most.
RANKS = ("#D55E00", "#56B4E9", "#F0E442", "#0072B2", "#E69F00", "#009E73", "#444444", "#CC79A7")
# From Paul Tol, for lines and marks on white.
LINES = ("#332288", "#EE3377", "#33BBEE", "#DDAA33", "#661100")
LINES_ON_DARK = ("#904DFF", *LINES[1:4], "#FAF2EB")  # lighter versions of the two dark colours
MARKS = ("o", "s", "^", "D", "v")
STYLES = ("-", "--", "-.", ":")
RIGHT, WRONG = LINES[0], LINES[1]
# Colours of an error by its size, from none upwards: blue within the budget, red beyond it.
ERRORS = ("#EEF1F4", "#D7E6F4", "#B3D1EC", "#7FB2DD", "#F6A9C1", "#EC5F94", "#B3124E")
DARKEST_WITH_BLACK = 0.18  # relative luminance: on anything darker, white has more contrast


def of_rank(rank: int) -> str:
    """The colour of a rank. From rank 8 on the colours repeat, and the number distinguishes the ranks."""
    return RANKS[rank % len(RANKS)]


def of_ranks(world: int) -> list[str]:
    """The colours of ranks 0 to world - 1."""
    return [of_rank(rank) for rank in range(world)]


def rank_map(world: int) -> dict[str, Any]:
    """Keywords for `imshow` of a matrix of ranks: `panel.imshow(owners, **rank_map(4))`. -1 or nan stays white."""
    from matplotlib.colors import ListedColormap

    return {
        "cmap": ListedColormap(of_ranks(world)).with_extremes(under="white", bad="white"),
        "vmin": -0.5,
        "vmax": world - 0.5,
        "interpolation": "nearest",
    }


def lines() -> tuple[str, ...]:
    """The colours of lines and marks on the current figure's background."""
    return LINES_ON_DARK if ink(ground()) == "white" else LINES


def line(number: int) -> dict[str, Any]:
    """Keywords for `plot` for line `number`: its colour, marker and dashes."""
    return {
        "color": lines()[number % len(LINES)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": STYLES[number % len(STYLES)],
        "markersize": 5,
    }


def ground() -> str:
    """The background of panels as `#rrggbb`."""
    from matplotlib import rcParams
    from matplotlib.colors import to_hex

    return to_hex(rcParams["axes.facecolor"])


def shade(share: float) -> tuple[float, ...]:
    """A colour between the text (0) and the background (1): on white, matplotlib's grey with that number."""
    from matplotlib import rcParams
    from matplotlib.colors import to_rgb

    ends = zip(to_rgb(rcParams["text.color"]), to_rgb(rcParams["axes.facecolor"]), strict=True)
    return tuple((1 - share) * text + share * ground for text, ground in ends)


def ink(colour: str) -> str:
    """Black or white, whichever is readable on a colour."""
    return "black" if luminance(colour) > DARKEST_WITH_BLACK else "white"


def luminance(colour: str) -> float:
    """Relative luminance of `#RRGGBB`, 0 for black and 1 for white (WCAG 2)."""
    return sum(share * x for share, x in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def linear(colour: str) -> tuple[float, ...]:
    """Red, green and blue of `#RRGGBB` as linear light."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return tuple(x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)


MAX_CELLS_WITH_TEXT = 512  # beyond that the numbers would be unreadable


def tiles(panel: Any, owners: Any, world: int, text: Any = None, **labels: Any) -> None:
    """Colour each cell of `owners` by its rank, with -1 and nan white; `text` is written into the cells.

    `labels` are keywords of `Axes.set`: title, xlabel, ylabel.
    """
    cells = np.asarray(owners, dtype=np.float64)
    panel.imshow(cells, aspect="auto", **rank_map(world))
    labels_of_cells = None if text is None else np.asarray(text)
    if labels_of_cells is not None and labels_of_cells.size <= MAX_CELLS_WITH_TEXT:
        for row, column in zip(*np.nonzero(cells >= 0), strict=True):
            text_colour = ink(of_rank(int(cells[row, column])))
            panel.text(
                column, row, str(labels_of_cells[row, column]), ha="center", va="center", fontsize=8, color=text_colour
            )
    panel.set(**labels)
    whole_numbers(panel)


def whole_numbers(panel: Any) -> None:
    """Ticks at integers only, because positions are integers."""
    from matplotlib.ticker import MaxNLocator

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def rank_legend(canvas: Any, world: int, name: str = "rank") -> None:
    """One patch for each rank, beside the panels of a figure with a constrained layout."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=of_rank(rank), edgecolor="0.5", label=f"{name} {rank}") for rank in range(world)]
    canvas.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
