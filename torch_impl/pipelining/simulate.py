"""A schedule run on paper: when each action starts and ends, and which ranks wait. No torch, no processes.

An action starts when its rank is free and what it needs has arrived: F of stage s needs F of stage s - 1, a backward
that of stage s + 1, W its own I. From rank to rank that takes p2p longer; who sends does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch_impl.pipelining.action import Action, Order, computed, has_communication
from torch_impl.pipelining.arguments import Number, check_positive
from torch_impl.pipelining.order_check import OrderFault, check_computed
from torch_impl.pipelining.timeline import Event, Timeline

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

    >>> from torch_impl.pipelining.schedule_order import schedule_order
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
