"""Layouts side by side: one strip for each, and next to it each rank's share of a causal mask's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ref.layouts import check_partition
from shardproof.report import colours
from shardproof.report.picture import draw_strip

INCHES_PER_LAYOUT = 0.62
Positions = Sequence[Sequence[int] | np.ndarray]  # the positions of each rank


def figure(layouts: Mapping[str, Positions], sequences: Mapping[str, Sequence[int]] | None = None) -> Any:
    """Draw the positions of each rank for each layout, by name; `sequences` are the borders of a packed one.

    Errors: ValueError if a layout is not a partition of its positions.
    """
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(9.0, 0.9 + INCHES_PER_LAYOUT * len(layouts)), layout="constrained")
    grid = canvas.subplots(len(layouts), 2, squeeze=False, width_ratios=(5, 1))
    borders = {
        name: list((sequences or {}).get(name, (0, sum(map(len, positions))))) for name, positions in layouts.items()
    }
    work = {name: causal_work(positions, borders[name]) for name, positions in layouts.items()}
    highest = max((share for shares in work.values() for share in shares), default=1.0)
    for (strip, bars), (name, positions) in zip(grid, layouts.items(), strict=True):
        _strip(strip, name, positions, borders[name])
        _bars(bars, work[name], 105 * highest)
        if strip is not grid[-1][0]:
            strip.set_xticks([])
            bars.set_xticks([])
    grid[-1][0].set_xlabel("position", fontsize=9)
    grid[-1][1].set_xlabel("rank", fontsize=9)
    grid[0][1].set_title("causal work", fontsize=9)
    grid[0][0].set_title("which rank holds which position", fontsize=9, loc="left")
    return canvas


def causal_work(by_rank: Positions, borders: Sequence[int]) -> np.ndarray:
    """Each rank's share of the (query, key) pairs; a query sees the keys of its own sequence up to itself."""
    starts = np.asarray(borders[:-1])
    pairs = [
        sum(position - starts[np.searchsorted(starts, position, side="right") - 1] + 1 for position in positions)
        for positions in by_rank
    ]
    return np.asarray(pairs) / max(sum(pairs), 1)


def _strip(panel: Any, name: str, by_rank: Positions, borders: Sequence[int]) -> None:
    size = sum(map(len, by_rank))
    check_partition(name, [np.asarray(positions) for positions in by_rank], size)
    owners = np.zeros(size, dtype=np.int64)
    for rank, positions in enumerate(by_rank):
        owners[np.asarray(positions, dtype=np.int64)] = rank
    draw_strip(panel, owners, 0.0, -0.5, float(size))
    for border in borders[1:-1]:
        panel.plot([border - 0.5] * 2, [-0.55, 0.55], color=colours.shade(0), linewidth=3, solid_capstyle="butt")
    panel.set(xlim=(-0.5, size - 0.5), ylim=(-0.55, 0.55), yticks=[0.0], yticklabels=[name])
    panel.tick_params(axis="y", length=0, labelsize=9)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[:].set_visible(False)


def _bars(panel: Any, shares: np.ndarray, top: float) -> None:
    world = len(shares)
    panel.bar(range(world), 100 * shares, color=colours.of_ranks(world), edgecolor=colours.shade(0.4), linewidth=0.5)
    panel.axhline(100 / world, color=colours.shade(0), linewidth=0.8, linestyle=":")
    panel.set(ylim=(0, top), xticks=range(world), yticks=[100 / world], yticklabels=[f"{100 / world:.0f} %"])
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
