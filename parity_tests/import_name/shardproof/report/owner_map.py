"""Draw a tensor as a matrix, its last dim across and all others down, each element in the colour of its rank."""

from __future__ import annotations

from itertools import groupby
from xml.etree.ElementTree import Element

import numpy as np

from shardproof.report import colours
from shardproof.report.markup import Child, svg, tag

MAX_ROWS, MAX_COLUMNS = 40, 48
MAP_WIDTH, LARGEST_CELL, SMALLEST_CELL = 300.0, 30.0, 6.0


def owner_map(ranks: np.ndarray, caption: str) -> Element:
    """A rectangle for each run of elements in a row that one rank owns, with the rank's number if there is room."""
    cells, step = reduced(ranks, first=True)
    width, height = cell_size(cells)
    parts: list[Child] = []
    for y, line in enumerate(cells):
        x = 0
        for rank, run in groupby(line.tolist()):
            length, paint = len(list(run)), int(rank) % len(colours.RANKS)
            at = {"x": x * width, "y": y * height, "width": length * width, "height": height}
            parts.append(tag("rect", **at, class_=f"cell r{paint}"))
            if length * width >= 9 * len(str(int(rank))) and height >= 10:
                centre = {"x": (x + length / 2) * width, "y": y * height + height / 2 + 4}
                parts.append(tag("text", str(int(rank)), **centre, class_=f"t{paint}"))
            x += length
    return figure(parts, cells.shape, (width, height), caption, step)


def reduced(array: np.ndarray, *, first: bool) -> tuple[np.ndarray, int]:
    """A matrix of at most 40 by 48 cells, with each cell's first or largest element; and the elements per cell."""
    matrix = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    down, across = (-(-size // most) for size, most in zip(matrix.shape, (MAX_ROWS, MAX_COLUMNS), strict=True))
    if down * across == 1:
        return matrix, 1
    rows, columns = (range(0, size, step) for size, step in zip(matrix.shape, (down, across), strict=True))
    if first:
        return matrix[::down, ::across], down * across
    return np.maximum.reduceat(np.maximum.reduceat(matrix, list(rows), 0), list(columns), 1), down * across


def cell_size(cells: np.ndarray) -> tuple[float, float]:
    width = min(max(MAP_WIDTH / cells.shape[1], SMALLEST_CELL), LARGEST_CELL)
    return width, min(max(width, 2 * SMALLEST_CELL), 18.0)


def figure(parts: list[Child], shape: tuple[int, ...], cell: tuple[float, float], caption: str, step: int) -> Element:
    scale = f"; each cell stands for up to {step} elements" if step > 1 else ""
    drawing = svg(cell[0] * shape[1], cell[1] * shape[0], *parts, label=caption)
    return tag("figure", drawing, tag("figcaption", caption + scale))
