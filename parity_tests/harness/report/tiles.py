"""Matrices of ranks as coloured cells: who holds which row and column, whose keys are here at which step."""

from __future__ import annotations

from typing import Any

import numpy as np

from parity_tests.harness.report import colours

MOST_TEXT = 512  # cells; in more the numbers could not be read


def tiles(panel: Any, owners: Any, world: int, text: Any = None, **labels: Any) -> None:
    """Colour each cell of `owners` by the rank in it, -1 or nan white; `text` is written into the cells.

    `labels` are keywords of `Axes.set`: title, xlabel, ylabel.
    """
    cells = np.asarray(owners, dtype=np.float64)
    panel.imshow(cells, aspect="auto", **colours.rank_map(world))
    said = None if text is None else np.asarray(text)
    if said is not None and said.size <= MOST_TEXT:
        for row, column in zip(*np.nonzero(cells >= 0), strict=True):
            ink = colours.ink(colours.of_rank(int(cells[row, column])))
            panel.text(column, row, str(said[row, column]), ha="center", va="center", fontsize=8, color=ink)
    panel.set(**labels)
    whole_numbers(panel)


def whole_numbers(panel: Any) -> None:
    """Ticks at whole numbers only, which is what positions are."""
    from matplotlib.ticker import MaxNLocator

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def rank_legend(canvas: Any, world: int, name: str = "rank") -> None:
    """One patch for each rank, beside the panels of a figure with a constrained layout."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colours.of_rank(rank), edgecolor="0.5", label=f"{name} {rank}") for rank in range(world)]
    canvas.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
