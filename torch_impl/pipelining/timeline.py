"""What a simulation found: who computed what, and when; idle time, bubbles, live activations, and a grid of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from torch_impl.pipelining.action import Action
from torch_impl.pipelining.arguments import Number

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
