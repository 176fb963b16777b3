"""A timeline as a picture: rows ranks, columns time; forward, backward and weight gradient coloured, idle hatched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_impl.pipelining.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Apart for every kind of colour vision, and light enough for black numbers.
COLOURS = {"F": "#a9c9ea", "B": "#e0703a", "I": "#f3e79b", "W": "#7e6ba8"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
INCHES_PER_RANK, WIDTH = 0.45, 11.0
SMALLEST_TEXT = 0.006  # of the makespan: narrower boxes have no number


def draw(timeline: Timeline, title: str = "") -> Figure:
    """The picture of one timeline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.9 + INCHES_PER_RANK * timeline.pp_size), layout="constrained")
    paint(figure.subplots(), timeline, title)
    return figure


def paint(ax: Axes, timeline: Timeline, title: str = "") -> None:
    """Draw into axes. Every second chunk of a rank has a dark bar on top; numbers are micro-batches."""
    from matplotlib.patches import Patch

    for rank in range(timeline.pp_size):
        ax.broken_barh(
            [(0, float(timeline.makespan))],
            (rank - 0.4, 0.8),
            facecolor="white",
            edgecolor="0.8",
            hatch="////",
            linewidth=0,
        )
    for event in timeline.events:
        start, length, kind = float(event.start), float(event.stop - event.start), event.action.kind
        ax.broken_barh(
            [(start, length)], (event.rank - 0.4, 0.8), facecolor=COLOURS[kind], edgecolor="white", linewidth=0.5
        )
        if timeline.chunk(event.action.stage) % 2:
            ax.broken_barh([(start, length)], (event.rank - 0.4, 0.12), facecolor="0.25", linewidth=0)
        if length > SMALLEST_TEXT * float(timeline.makespan):
            ax.text(start + length / 2, event.rank, str(event.action.microbatch), ha="center", va="center", fontsize=7)
    kinds = [kind for kind in COLOURS if any(event.action.kind == kind for event in timeline.events)]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor="0.8", hatch="////", label="idle"))
    if any(timeline.chunk(event.action.stage) % 2 for event in timeline.events):
        handles.append(Patch(color="0.25", label="bar: second chunk"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, frameon=False)
    ax.set(
        xlabel="time units",
        yticks=range(timeline.pp_size),
        yticklabels=[f"rank {rank}" for rank in range(timeline.pp_size)],
        xlim=(0, float(timeline.makespan) or 1),
        ylim=(timeline.pp_size - 0.5, -0.5),
    )
    ax.set_title(title, fontsize=9, loc="left")
