"""Simulate a schedule: when each action starts and ends, which ranks wait, and how many activations are live.

An action starts when its rank is free and its input has arrived: F of stage s needs F of stage s - 1, a backward needs
the backward of stage s + 1, W needs its own I. A message between two ranks takes p2p; the sender does not wait for it.
Nothing here loads torch or starts a process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from torch_impl.contract import Instance, PositiveInt, Rejected, contract
from torch_impl.pipelining.order import (
    COMPUTED,
    Action,
    InvalidOrder,
    Order,
    check_computed,
    computations,
    has_communication,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Number = int | float | Fraction
Time = Number | Sequence[Number]


@dataclass(frozen=True)
class Times:
    """Durations of a chunk's forward f, input gradient i and weight gradient w; a full backward takes i + w.

    Each is one number, or a list with a number for each stage. `p2p` is the duration of a message between two ranks;
    nothing is sent within a rank.

    Errors: TypeError for a duration that is not a number; ValueError if it is negative, infinite or NaN.
    """

    f: Time = 1.0
    i: Time = 1.0
    w: Time = 1.0
    p2p: Number = 0.0

    @contract
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            times: Sequence[Any] = value if isinstance(value, Sequence) and field.name != "p2p" else [value]
            for time in times:
                try:
                    is_time = math.isfinite(time) and time >= 0 and not isinstance(time, bool)
                except TypeError:
                    raise Rejected(f"{field.name}={value!r} is not a number; pass a number", TypeError) from None
                if not is_time:
                    raise Rejected(f"{field.name}={value!r} must be finite and at least 0")

    def of(self, action: Action) -> Number:
        """The duration of an `action`. Errors: ValueError if a list has no entry for its stage."""
        letters = {"F": "f", "I": "i", "W": "w", "B": "iw"}[action.kind]
        return sum(self._at(letter, action.stage) for letter in letters)

    def _at(self, letter: str, stage: int) -> Number:
        value = getattr(self, letter)
        if not isinstance(value, Sequence):
            return value
        if stage >= len(value):
            raise ValueError(f"pipelining.Times: {letter} has {len(value)} times, but there is a stage {stage}")
        return value[stage]


StageRanks = Annotated[
    Sequence[int] | Mapping[int, int], Instance((Sequence, Mapping), "pass the rank of each stage in a list or dict")
]


@contract
def simulate(
    order: Order,
    stage_to_rank: StageRanks,
    times: Times | None = None,
    *,
    n_microbatches: PositiveInt | None = None,
) -> Timeline:
    """Simulate an `order`. Overlapped pairs run one after the other; messages take none of their rank's time.

    The default of `n_microbatches` is the largest micro-batch in the order plus one.

    >>> from torch_impl.pipelining.named_schedules import schedule_order
    >>> simulate(schedule_order("GPipe", 2, 3, 1), [0, 1]).makespan
    12.0

    Errors: ValueError with rank and position for an action that is missing, repeated, of an unknown stage or
            micro-batch or on another stage's rank, for a backward before its forward, and for a deadlock, with its
            cycle.
    """
    if n_microbatches is None:
        n_microbatches = 1 + max(
            (part.microbatch or 0 for actions in order for part in computations(actions)), default=0
        )
    check_computed(order, stage_to_rank, n_microbatches)
    ranks = tuple(stage_to_rank[stage] for stage in range(len(stage_to_rank)))
    return Timeline(tuple(run_order(order, ranks, times or Times())), ranks, len(order))


def run_order(order: Order, ranks: Sequence[int], times: Times) -> list[Event]:
    """The events of a valid order, sorted by rank. Errors: InvalidOrder for a deadlock."""
    sends = has_communication(order)
    queues = [
        [(position, part) for position, action in enumerate(actions) if action for part in action.parts]
        for actions in order
    ]
    next_index, free_at = [0] * len(order), [0] * len(order)
    done: dict[Action, Number] = {}
    events: list[Event] = []
    progressed = True
    while progressed:
        # 1. Let each rank in turn run its actions until one lacks an input.
        progressed = False
        for rank, queue in enumerate(queues):
            while next_index[rank] < len(queue):
                _, action = queue[next_index[rank]]
                inputs = _inputs(action, ranks, done, sends)
                if any(source not in done for source, _ in inputs):
                    break
                # 2. The action starts when its rank is free and all its inputs have arrived.
                arrivals = [done[source] + (times.p2p if is_remote else 0) for source, is_remote in inputs]
                start = max([free_at[rank], *arrivals])
                # A message takes none of its rank's time: it is sent as soon as the rank reaches it.
                stop = start
                if action.kind in COMPUTED:
                    stop = start + times.of(action)
                    events.append(Event(rank, action, start, stop))
                    free_at[rank] = stop  # pyright: ignore[reportArgumentType, reportCallIssue]
                done[action] = stop
                next_index[rank] += 1
                progressed = True
    # 3. No rank can continue: either all are done, or some wait for each other.
    if any(index < len(queue) for index, queue in zip(next_index, queues, strict=True)):
        raise _deadlock(queues, next_index, ranks, done, sends)
    return sorted(events, key=lambda event: event.rank)


def _inputs(
    action: Action, ranks: Sequence[int], done: Mapping[Action, Number], sends: bool
) -> list[tuple[Action, bool]]:
    """The actions of other stages that this one waits for, and whether each is on another rank."""
    stage, kind, m = action.stage, action.kind, action.microbatch
    if kind == "F" and stage > 0:
        return [_input_from(stage - 1, stage, "F", m, ranks, sends)]
    if kind in ("B", "I") and stage < len(ranks) - 1:
        source, is_remote = _input_from(stage + 1, stage, "B", m, ranks, sends)
        split = source._replace(kind="I")  # the first half of a split backward computes the gradient
        return [(split if source.kind == "B" and split in done else source, is_remote)]
    return []


def _input_from(
    source: int, stage: int, kind: str, m: int | None, ranks: Sequence[int], sends: bool
) -> tuple[Action, bool]:
    is_remote = ranks[source] != ranks[stage]
    # If the order states messages, an input arrives when it is sent, which may be later than its computation.
    return Action(source, f"SEND_{kind}" if is_remote and sends else kind, m), is_remote


def _deadlock(
    queues: list[list[tuple[int, Action]]],
    next_index: list[int],
    ranks: Sequence[int],
    done: dict[Action, Number],
    sends: bool,
) -> InvalidOrder:
    """The error for ranks that wait for each other, with their cycle."""

    def missing_input(rank: int) -> tuple[Action, Action]:
        _, action = queues[rank][next_index[rank]]
        return action, next(source for source, _ in _inputs(action, ranks, done, sends) if source not in done)

    # Follow each waiting rank to the rank it waits for; the first rank that occurs twice starts the cycle.
    rank = next(rank for rank, queue in enumerate(queues) if next_index[rank] < len(queue))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = ranks[missing_input(rank)[1].stage]
    cycle = path[path.index(rank) :]
    waits = []
    for member in cycle:
        action, source = missing_input(member)
        waits.append(f"rank {member} waits in '{action}' for '{source}' of rank {ranks[source.stage]}")
    return InvalidOrder(cycle[0], queues[cycle[0]][next_index[cycle[0]]][0], f"deadlock: {', '.join(waits)}")


# The most columns of a grid; if the exact grid would be wider, a column is 1 / WIDEST of the makespan.
WIDEST = 400


@dataclass(frozen=True)
class Event:
    """One action on one rank, from `start` to `stop`."""

    rank: int
    action: Action
    start: Number
    stop: Number


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks, in order on each rank. Times have the unit of `Times`."""

    events: tuple[Event, ...]
    stage_to_rank: tuple[int, ...]
    pp_size: int

    def of(self, rank: int) -> list[Event]:
        """The events of one `rank`."""
        return [event for event in self.events if event.rank == rank]

    @cached_property
    def makespan(self) -> Number:
        """The time at which the last action ends."""
        return max((event.stop for event in self.events), default=0)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """The time that each rank computes."""
        return tuple(sum(event.stop - event.start for event in self.of(rank)) for rank in range(self.pp_size))

    @property
    def idle(self) -> tuple[Number, ...]:
        """The time that each rank waits until the last action of any rank ends."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> tuple[Number, ...]:
        """Idle time of each rank as a fraction of the makespan; 0 if the makespan is 0."""
        return tuple(idle / (self.makespan or 1) for idle in self.idle)

    def live(self, rank: int) -> list[tuple[Number, int]]:
        """The number of chunks whose activations `rank` stores, as (time, number from then on).

        A chunk's activations are live from the start of F to the end of B, or of W if the backward is split. At equal
        times activations are freed before new ones are stored.
        """
        changes: dict[Number, list[int]] = {}
        for event in self.of(rank):
            if event.action.kind == "F":
                changes.setdefault(event.start, []).append(1)
            elif event.action.kind in ("B", "W"):
                changes.setdefault(event.stop, []).append(-1)
        # Apply all changes of one time at once, so that frees come before stores.
        live, counts = 0, []
        for time in sorted(changes):
            live += sum(changes[time])
            counts.append((time, live))
        return counts

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The largest number of chunks whose activations each rank stores at once."""
        return tuple(max((live for _, live in self.live(rank)), default=0) for rank in range(self.pp_size))

    def chunk(self, stage: int) -> int:
        """The index of a `stage` among its rank's stages."""
        return sum(rank == self.stage_to_rank[stage] for rank in self.stage_to_rank[:stage])

    def __str__(self) -> str:
        """A grid of ranks (rows) and time (columns). Dots are idle; every second chunk of a rank has small letters."""
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The grid, as `str` has it. Columns beyond `width` characters continue below, in a grid of their own."""
        columns, unit = self._columns()
        grid = [self._cells(rank, columns, unit) for rank in range(self.pp_size)]
        figures = [f"| idle {self.bubble[rank]:.1%}, live {self.peak_live[rank]}" for rank in range(self.pp_size)]
        names = [f"rank {rank}" for rank in range(self.pp_size)]
        left, room = max(map(len, names)), max((len(cell) for cells in grid for cell in cells), default=1)
        most = columns
        if width is not None:
            most = max((width - left - 1 - max(map(len, figures))) // (room + 1), 1)
        lines = [f"{self.pp_size} ranks, {len(self.stage_to_rank)} stages, makespan {self.makespan:g}"]
        for first in range(0, max(columns, 1), max(most, 1)):
            is_last = first + most >= columns
            lines += [""] if first else []
            for name, cells, figure in zip(names, grid, figures, strict=True):
                row = " ".join(f"{cell:<{room}}" for cell in cells[first : first + max(most, 1)])
                lines.append(f"{name:>{left}} |{row}{figure if is_last else ''}".rstrip())
        return "\n".join(lines)

    def _cells(self, rank: int, columns: int, unit: Number) -> list[str]:
        """A rank's row: an action in each column of time. An action that is shorter than a column may have no cell."""
        cells = ["."] * columns
        for event in self.of(rank):
            first, last = round(event.start / unit), round(event.stop / unit)
            letter = event.action.kind
            name = f"{letter.lower() if self.chunk(event.action.stage) % 2 else letter}{event.action.microbatch}"
            cells[first:last] = [name, *["-"] * (last - first - 1)][: last - first]  # then dashes
        return cells

    def _columns(self) -> tuple[int, Number]:
        """The number of columns of the grid, and the time of one: the greatest common divisor of all times."""
        times = [Fraction(time) for event in self.events for time in (event.start, event.stop)]
        # Every float is an exact fraction, so all times have a common divisor; a tiny one is rounded up below.
        denominator = math.lcm(*(time.denominator for time in times))
        divisor = math.gcd(*(int(time * denominator) for time in times))
        if not divisor:
            return 0, 1
        columns = int(Fraction(self.makespan) * denominator) // divisor
        return (columns, self.makespan / columns) if columns <= WIDEST else (WIDEST, self.makespan / WIDEST)


# Distinct under every kind of colour vision, and light enough for black numbers.
COLOURS = {"F": "#a9c9ea", "B": "#e0703a", "I": "#f3e79b", "W": "#7e6ba8"}
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
INCHES_PER_RANK, WIDTH = 0.45, 11.0
SMALLEST_TEXT = 0.006  # fraction of the makespan; narrower boxes have no number


@contract
def draw(timeline: Timeline, title: str = "") -> Figure:
    """Draw a `timeline`: rows are ranks, columns are time, colours are kinds of actions, idle time is hatched.

    Errors: TypeError for a `title` that is not a str.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.9 + INCHES_PER_RANK * timeline.pp_size), layout="constrained")
    paint(figure.subplots(), timeline, title)
    return figure


def paint(ax: Axes, timeline: Timeline, title: str = "") -> None:
    """Draw a timeline into axes. Every second chunk of a rank has a dark bar on top; numbers are micro-batches."""
    from matplotlib import rcParams
    from matplotlib.patches import Patch

    # Use the page's colours (by default white and a light grey); boxes are light on any page.
    ground, grey = rcParams["axes.facecolor"], rcParams["legend.edgecolor"]
    idle = {"facecolor": ground, "edgecolor": grey, "hatch": "////"}
    for rank in range(timeline.pp_size):
        ax.broken_barh([(0, float(timeline.makespan))], (rank - 0.4, 0.8), linewidth=0, **idle)
    for event in timeline.events:
        start, length, kind = float(event.start), float(event.stop - event.start), event.action.kind
        ax.broken_barh(
            [(start, length)], (event.rank - 0.4, 0.8), facecolor=COLOURS[kind], edgecolor=ground, linewidth=0.5
        )
        if timeline.chunk(event.action.stage) % 2:
            ax.broken_barh([(start, length)], (event.rank - 0.4, 0.12), facecolor="0.25", linewidth=0)
        if length > SMALLEST_TEXT * float(timeline.makespan):
            centre, number = start + length / 2, str(event.action.microbatch)
            ax.text(centre, event.rank, number, ha="center", va="center", fontsize=7, color="black")
    kinds = [kind for kind in COLOURS if any(event.action.kind == kind for event in timeline.events)]
    handles = [Patch(color=COLOURS[kind], label=KIND_NAMES[kind]) for kind in kinds]
    handles.append(Patch(**idle, label="idle"))
    if any(timeline.chunk(event.action.stage) % 2 for event in timeline.events):
        outline = rcParams["text.color"]  # makes the dark bar of the legend visible on a dark page
        handles.append(Patch(facecolor="0.25", edgecolor=outline, label="bar: second chunk"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, frameon=False)
    ax.set(
        xlabel="time units",
        yticks=range(timeline.pp_size),
        yticklabels=[f"rank {rank}" for rank in range(timeline.pp_size)],
        xlim=(0, float(timeline.makespan) or 1),
        ylim=(timeline.pp_size - 0.5, -0.5),
    )
    ax.set_title(title, fontsize=9, loc="left")
