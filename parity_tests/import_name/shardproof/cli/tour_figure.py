"""The tour's results in one figure: error over budget of every scheme, and of the injected bugs beyond it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.report import colours
from shardproof.report.report import Report

LEFT, RIGHT = 1e-4, 1e8  # ratios outside are drawn at the edge
# Marks differ in shape and height as well, so that neither hides the other.
MARKS = {"output": (0, "o", 0.13), "gradient": (3, "s", -0.13)}  # the index of the colour, shape, height


@dataclass(frozen=True)
class Line:
    """One line of the figure: a name, and the worst error over budget of its outputs and of its gradients."""

    name: str
    ratios: Mapping[str, float]

    @property
    def headroom(self) -> str:
        worst = max(self.ratios.values(), default=0.0)
        if worst > 1:
            return f"{worst:.0e}x over"
        return f"{1 / worst:.2g}x" if worst > 0.01 else f"{1 / worst:.0f}x" if worst > 0 else "exact"


def line_of(name: str, report: Report) -> Line:
    worst = {role: report.worst(role) for role in MARKS}
    return Line(name, {role: row.ratio for role, row in worst.items() if row is not None})


def figure(verified: Sequence[Line], injected: Sequence[Line], caption: str) -> Any:
    """A matplotlib figure; `verified` above, `injected` below a gap."""
    from matplotlib.figure import Figure

    lines = [*verified, None, *injected]
    canvas = Figure(figsize=(9.0, 1.5 + 0.24 * len(lines)), layout="constrained")
    panel = canvas.subplots()
    levels = [(-height, line) for height, line in enumerate(lines) if line is not None]
    handles = [_draw_marks(panel, role, levels) for role in MARKS]
    for height, line in levels:
        colour = colours.WRONG if max(line.ratios.values(), default=0.0) > 1 else colours.shade(0)
        panel.text(RIGHT * 20, height, line.headroom, ha="right", va="center", fontsize=8, color=colour)
    panel.axvline(1.0, color=colours.shade(0), linewidth=1.0)
    panel.text(1.0, 0.9, "budget", ha="center", fontsize=8)
    panel.text(RIGHT * 20, 0.9, "headroom", ha="right", fontsize=8)
    panel.axhspan(-len(lines) + 0.5, -len(verified), color=colours.shade(0.95), zorder=0)
    panel.text(LEFT * 1.3, -len(verified), "injected bugs", va="center", fontsize=8, style="italic")
    panel.set(xscale="log", xlim=(LEFT / 2, RIGHT * 30), ylim=(-len(lines) + 0.5, 0.8))
    panel.set_yticks([height for height, _ in levels], [line.name for _, line in levels], fontsize=8)
    panel.set_xlabel("largest error / budget   (left edge: none)", fontsize=9)
    panel.set_title("What was verified", loc="left", fontsize=11)
    panel.grid(axis="x", color=colours.shade(0.9), linewidth=0.6)
    panel.set_axisbelow(True)
    panel.legend(handles=handles, loc="upper right", fontsize=8, frameon=False, bbox_to_anchor=(0.9, 1.0))
    canvas.supxlabel(caption, fontsize=7, color=colours.shade(0.35))
    return canvas


def _draw_marks(panel: Any, role: str, levels: Sequence[tuple[int, Line]]) -> Any:
    """One mark on each line with a ratio for this role; returns the legend's handle."""
    number, mark, lift = MARKS[role]
    ratios = [(line.ratios[role], height + lift) for height, line in levels if role in line.ratios]
    at = [min(max(ratio, LEFT), RIGHT) if math.isfinite(ratio) else RIGHT for ratio, _ in ratios]
    heights = [height for _, height in ratios]
    style = {"color": colours.lines()[number], "edgecolors": colours.ground(), "linewidths": 0.5}
    return panel.scatter(at, heights, s=26, marker=mark, label=role, zorder=3, **style)
