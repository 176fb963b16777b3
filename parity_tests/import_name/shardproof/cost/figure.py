"""Crossovers as a figure: the time of each way over the size of one axis, and its bytes between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.cost.candidates import Comparison
from shardproof.cost.table import AMOUNTS, best, swept_axis, ways_of
from shardproof.report import colours

INCHES = (3.6, 3.3)  # per panel
MOST_TICKS = 5


def figure(comparisons: Sequence[Comparison], title: str = "") -> Any:
    """Panels for step, communication and bytes between hosts; one line per way, from its cheapest candidate."""
    from matplotlib.figure import Figure

    axis = swept_axis(comparisons)
    sizes = [one.setting.mesh[axis] for one in comparisons]
    canvas = Figure(figsize=(INCHES[0] * len(AMOUNTS), INCHES[1]), layout="constrained")
    panels = canvas.subplots(1, len(AMOUNTS))
    scales = {"bytes": (1e9, "GB")}
    for panel, (name, amount) in zip(panels, AMOUNTS.items(), strict=True):
        unit, label = scales.get(name.partition(" ")[0], (1e-3, "ms"))
        for number, way in enumerate(ways_of(comparisons)):
            chosen = [best(one, way, amount) for one in comparisons]
            points = {
                size: amount(each) / unit for size, each in zip(sizes, chosen, strict=True) if each and amount(each)
            }
            panel.plot(points.keys(), points.values(), **colours.line(number), label=way)
        panel.set(xscale="log", yscale="log", xlabel=f"ranks of {axis}", ylabel=label)
        panel.set_title(name, fontsize=9)
        ticks = sizes[:: -(-len(sizes) // MOST_TICKS)]
        panel.set_xticks(ticks, [f"{size:,}" for size in ticks])
        panel.minorticks_off()
        panel.grid(color=colours.shade(0.9))
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    canvas.suptitle(title, fontsize=10)
    return canvas
