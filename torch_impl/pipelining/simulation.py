"""A schedule run on paper: when each action starts and ends, and which ranks wait. No torch, no processes.

An action starts when its rank is free and what it needs has arrived: F of stage s needs F of stage s - 1, a backward
that of stage s + 1, W its own I. From rank to rank that takes p2p longer; who sends does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch_impl.pipelining.arguments import Number, check_positive
from torch_impl.pipelining.order import Action, Order, OrderFault, check_computed, computed, has_communication

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Time = Number | Sequence[Number]
NAME = "simulate"


@dataclass(frozen=True)
class Times:
    """Durations for one chunk, each one number or one for each stage; a whole backward takes i + w.

    `p2p` is what a message between two ranks takes; within a rank nothing is sent.
    """

    f: Time = 1.0
    i: Time = 1.0
    w: Time = 1.0
    p2p: Number = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            listed: Sequence[Any] = given if isinstance(given, Sequence) and each.name != "p2p" else [given]
            for time in listed:
                try:
                    is_time = math.isfinite(time) and time >= 0 and not isinstance(time, bool)
                except TypeError:
                    raise TypeError(f"pipelining.Times: {each.name}={given!r} is no number; pass one") from None
                if not is_time:
                    raise ValueError(f"pipelining.Times: {each.name}={given!r} must be finite and at least 0")

    def of(self, action: Action) -> Number:
        """How long an action computes. Errors: ValueError where a list has no entry for its stage."""
        letters = {"F": "f", "I": "i", "W": "w", "B": "iw"}[action.kind]
        return sum(self._at(letter, action.stage) for letter in letters)

    def _at(self, letter: str, stage: int) -> Number:
        given = getattr(self, letter)
        if not isinstance(given, Sequence):
            return given
        if stage >= len(given):
            raise ValueError(f"pipelining.Times: {letter} has {len(given)} times, but there is a stage {stage}")
        return given[stage]


def simulate(
    order: Order,
    stage_to_rank: Sequence[int] | Mapping[int, int],
    times: Times | None = None,
    *,
    n_microbatches: int | None = None,
) -> Timeline:
    """Run an order. Pairs run one after the other; an order may say what is sent, which takes no time of its rank.

    Without `n_microbatches` there are as many as the largest number in the order says.

    >>> from torch_impl.pipelining.named_schedules import schedule_order
    >>> simulate(schedule_order("GPipe", 2, 3, 1), [0, 1]).makespan
    12.0

    Errors: ValueError with rank and position for an action that is missing, doubled, of no stage or micro-batch or
            on another's rank, for a backward before its forward, and for a deadlock, with its cycle.
    """
    if n_microbatches is None:
        n_microbatches = 1 + max((part.microbatch or 0 for actions in order for part in computed(actions)), default=0)
    check_positive(NAME, "n_microbatches", n_microbatches)
    check_computed(order, stage_to_rank, n_microbatches)
    ranks = tuple(stage_to_rank[stage] for stage in range(len(stage_to_rank)))
    return Timeline(tuple(_run(order, ranks, times or Times())), ranks, len(order))


def _run(order: Order, ranks: Sequence[int], times: Times) -> list[Event]:
    """Ranks in turn go on until they must wait. Errors: OrderFault where all wait."""
    sends = has_communication(order)
    queues = [
        [(position, part) for position, action in enumerate(actions) if action for part in action.parts]
        for actions in order
    ]
    places, free = [0] * len(order), [0] * len(order)
    done: dict[Action, Number] = {}
    events: list[Event] = []
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while places[rank] < len(queue):
                _, action = queue[places[rank]]
                needs = _needs(action, ranks, done, sends)
                if any(need not in done for need, _ in needs):
                    break
                arrived = [done[need] + (times.p2p if is_far else 0) for need, is_far in needs]
                start = max([free[rank], *arrived])
                stop = start
                if action.kind in ("F", "B", "I", "W"):
                    stop = start + times.of(action)
                    events.append(Event(rank, action, start, stop))
                    free[rank] = stop  # pyright: ignore[reportArgumentType, reportCallIssue]
                done[action] = stop
                places[rank] += 1
                moved = True
    if any(place < len(queue) for place, queue in zip(places, queues, strict=True)):
        raise _deadlock(queues, places, ranks, done, sends)
    return sorted(events, key=lambda event: event.rank)


def _needs(
    action: Action, ranks: Sequence[int], done: Mapping[Action, Number], sends: bool
) -> list[tuple[Action, bool]]:
    """What an action waits for, and whether that comes from another rank."""
    stage, kind, m = action.stage, action.kind, action.microbatch
    if kind == "F" and stage > 0:
        return [_from(stage - 1, stage, "F", m, ranks, sends)]
    if kind in ("B", "I") and stage < len(ranks) - 1:
        need, is_far = _from(stage + 1, stage, "B", m, ranks, sends)
        halved = need._replace(kind="I")
        return [(halved if need.kind == "B" and halved in done else need, is_far)]
    return []


def _from(source: int, stage: int, kind: str, m: int | None, ranks: Sequence[int], sends: bool) -> tuple[Action, bool]:
    is_far = ranks[source] != ranks[stage]
    return Action(source, f"SEND_{kind}" if is_far and sends else kind, m), is_far


def _deadlock(
    queues: list[list[tuple[int, Action]]],
    places: list[int],
    ranks: Sequence[int],
    done: dict[Action, Number],
    sends: bool,
) -> OrderFault:
    """The fault of ranks that wait for each other, with the cycle."""
    rank = next(rank for rank, queue in enumerate(queues) if places[rank] < len(queue))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        _, action = queues[rank][places[rank]]
        need = next(need for need, _ in _needs(action, ranks, done, sends) if need not in done)
        rank = ranks[need.stage]
    cycle = path[path.index(rank) :]
    said = []
    for member in cycle:
        _, action = queues[member][places[member]]
        need = next(need for need, _ in _needs(action, ranks, done, sends) if need not in done)
        said.append(f"rank {member} waits in '{action}' for '{need}' of rank {ranks[need.stage]}")
    return OrderFault(cycle[0], queues[cycle[0]][places[cycle[0]]][0], f"deadlock: {', '.join(said)}")


WIDEST = 400  # columns of a grid; where times have no common measure, columns are a share of the whole


@dataclass(frozen=True)
class Event:
    """One action on one rank."""

    rank: int
    action: Action
    start: Number
    stop: Number


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks, each rank's in order. Times are in the unit of `Times`."""

    events: tuple[Event, ...]
    stage_to_rank: tuple[int, ...]
    pp_size: int

    def of(self, rank: int) -> list[Event]:
        """Events of one rank."""
        return [event for event in self.events if event.rank == rank]

    @cached_property
    def makespan(self) -> Number:
        return max((event.stop for event in self.events), default=0)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """Time in which each rank computes."""
        return tuple(sum(event.stop - event.start for event in self.of(rank)) for rank in range(self.pp_size))

    @property
    def idle(self) -> tuple[Number, ...]:
        """What each rank waits until the last one has ended."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> tuple[Number, ...]:
        """Idle time of each rank as a fraction of the makespan; 0 where nothing takes time."""
        return tuple(idle / (self.makespan or 1) for idle in self.idle)

    def live(self, rank: int) -> list[tuple[Number, int]]:
        """(time, chunks whose activations the rank holds from then on).

        A chunk's activations live from the start of F to the end of B, or of W where the backward is cut. What ends
        at a time makes room for what starts then.
        """
        changes: dict[Number, list[int]] = {}
        for event in self.of(rank):
            if event.action.kind == "F":
                changes.setdefault(event.start, []).append(1)
            elif event.action.kind in ("B", "W"):
                changes.setdefault(event.stop, []).append(-1)
        held, counts = 0, []
        for time in sorted(changes):
            held += sum(changes[time])
            counts.append((time, held))
        return counts

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The most chunks that each rank holds at once."""
        return tuple(max((held for _, held in self.live(rank)), default=0) for rank in range(self.pp_size))

    def chunk(self, stage: int) -> int:
        """Which of its rank's stages a stage is, from 0."""
        return sum(rank == self.stage_to_rank[stage] for rank in self.stage_to_rank[:stage])

    def __str__(self) -> str:
        """A grid: rows ranks, columns time; letters of every second chunk of a rank are small, idle time is dots."""
        columns, unit = self._measure()
        lines = []
        for rank in range(self.pp_size):
            cells = ["."] * columns
            for event in self.of(rank):
                first, last = round(event.start / unit), round(event.stop / unit)
                letter = event.action.kind
                name = f"{letter.lower() if self.chunk(event.action.stage) % 2 else letter}{event.action.microbatch}"
                cells[first:last] = [name, *["-"] * (last - first - 1)][: last - first]
            lines.append((f"rank {rank}", cells, f"idle {self.bubble[rank]:.1%}, live {self.peak_live[rank]}"))
        width = max((len(cell) for _, cells, _ in lines for cell in cells), default=1)
        head = f"{self.pp_size} ranks, {len(self.stage_to_rank)} stages, makespan {self.makespan:g}"
        left = max(len(name) for name, _, _ in lines)
        rows = [
            f"{name:>{left}} |{' '.join(f'{cell:<{width}}' for cell in cells)}| {said}" for name, cells, said in lines
        ]
        return "\n".join([head, *rows])

    def _measure(self) -> tuple[int, Number]:
        """Columns of the grid, and the time of one."""
        times = [Fraction(time) for event in self.events for time in (event.start, event.stop)]
        denominator = math.lcm(*(time.denominator for time in times))
        measure = math.gcd(*(int(time * denominator) for time in times))
        if not measure:
            return 0, 1
        columns = int(Fraction(self.makespan) * denominator) // measure
        return (columns, self.makespan / columns) if columns <= WIDEST else (WIDEST, self.makespan / WIDEST)


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
