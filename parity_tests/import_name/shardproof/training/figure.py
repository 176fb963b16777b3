"""The loss curves of a run and its reference, and below them the differences, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardproof.report.colours import LINES
from shardproof.training.judged import Judged

SMALLEST = 1e-17  # drawn in place of a difference of 0


def figure(steps: Sequence[Judged], title: str) -> Any:
    """Draw the judged steps as a matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    canvas = Figure(figsize=(8.5, 5.0), layout="constrained")
    curves, apart = canvas.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at = [step.index + 1 for step in steps]
    curves.plot(at, [step.want for step in steps], color="0.7", linewidth=5, label="one device (JAX, float64)")
    curves.plot(at, [step.loss for step in steps], color=LINES[0], linewidth=1.2, label="the mesh")
    curves.set(ylabel="loss", title=title)
    curves.legend()
    for name, color in (("loss", LINES[0]), ("norm", LINES[1])):
        apart.plot(at, [max(step.rows[name].error, SMALLEST) for step in steps], color=color, label=name)
    for kind, color in (("gradient/", LINES[2]), ("weight/", LINES[3])):
        worst = [step.worst(kind)[1] for step in steps]
        apart.plot(at, [max(row.error, SMALLEST) for row in worst], color=color, label=f"worst {kind.strip('/')}")
        apart.plot(at, [row.budget for row in worst], color=color, linestyle=":", linewidth=1)
    apart.set(yscale="log", xlabel="optimiser step", ylabel="relative difference\n(dotted: budget)")
    apart.xaxis.set_major_locator(MaxNLocator(integer=True))
    apart.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return canvas
