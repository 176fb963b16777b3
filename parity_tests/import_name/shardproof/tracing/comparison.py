"""Compare the ranks' recordings with the reference's trace, event by event, in order of execution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from shardproof.explain.clues import explain
from shardproof.explain.evidence import Evidence
from shardproof.judge.compare import K, same_number
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.tracing.events import IN, LOSS, NORM, Event
from shardproof.tracing.flax_side import ReferenceTrace
from shardproof.tracing.torch_side import Recording

Positions = Callable[[int, Event, tuple[int, ...], tuple[int, ...]], Sequence[np.ndarray] | None]
NONE: Mapping[str, Any] = MappingProxyType({})
ANOTHER_SHAPE = "has another shape"
THE_MODEL = "the model"  # its own name is empty
ELEMENT = 16.0  # largest error of one element, relative to the root mean square of all, when naming a mistake


@dataclass(frozen=True)
class Line:
    """One tensor: its largest relative error over the ranks, the budget, and the ranks beyond it.

    `phase` is forward, backward or weight; `home` is the module that made it.
    """

    name: str
    phase: str
    home: str
    error: float
    budget: float
    ranks: tuple[int, ...]
    notes: tuple[str, ...] = ()
    event: Event | None = None  # None for a weight, or a number of the full model

    @property
    def ok(self) -> bool:
        return not self.ranks

    @property
    def ratio(self) -> float:
        return self.error / self.budget


@dataclass(frozen=True)
class Found:
    """The recordings of all ranks, the full gradients of the weights, and each rank's numbers for the full model."""

    ranks: Sequence[Recording]
    of_weights: Mapping[str, np.ndarray]
    numbers: Sequence[Mapping[str, float]] = ()
    # By weight and by axis that repeats it, the gradients of the axis's ranks; and the coordinates of the compared one.
    by_rank: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    at: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def whole(rank: int, event: Event, full: tuple[int, ...], local: tuple[int, ...]) -> list[np.ndarray] | None:
    """The positions of a rank that has the full tensor; None if it has another shape."""
    return [np.arange(size) for size in full] if full == local else None


def lines(
    reference_trace: ReferenceTrace, recorded: Found, positions: Positions, dtype: str, axes: Mapping[str, int]
) -> list[Line]:
    """Forward in order, the loss, then backward in reverse order, with each module's weights at its end.

    `positions(rank, event, full shape, local shape)` gives the rank's indices in each dim of the full tensor, or None
    if its shape does not fit. An event without a recording, or missing in the reference, has no line.
    """
    judge = _Judge(reference_trace, dtype, axes, {event.module for event in reference_trace.values})
    events = [event for event in reference_trace.values if any(event in rank.values for rank in recorded.ranks)]
    result = []
    for event in events:
        pieces = {i: rank.values[event] for i, rank in enumerate(recorded.ranks) if event in rank.values}
        result.append(judge.event("forward", event, reference_trace.values[event], pieces, positions))
    result += judge.number(LOSS, "forward", recorded.numbers)
    for step in _backward(events, list(reference_trace.of_weights)):
        if isinstance(step, str):
            if step in recorded.of_weights:
                copies = recorded.by_rank.get(step, {}), recorded.at.get(step, {})
                result.append(judge.weight(step, recorded.of_weights[step], *copies))
            continue
        pieces = {i: rank.gradients[step] for i, rank in enumerate(recorded.ranks) if step in rank.gradients}
        if pieces:
            result.append(judge.event("backward", step, reference_trace.gradients[step], pieces, positions))
    return result + judge.number(NORM, "weight", recorded.numbers)


def first(compared: Sequence[Line]) -> Line | None:
    """The first line beyond its budget."""
    return next((line for line in compared if not line.ok), None)


def _backward(events: Sequence[Event], weights: Sequence[str]) -> Iterator[Event | str]:
    """Events from last to first; a weight comes before its module's first event, or last if it has no module."""
    waiting = {weight: _owner(weight, {event.module for event in events}) for weight in weights}
    entrance = {event.module: event for event in reversed(events)}
    for event in reversed(events):
        for weight in [weight for weight, owner in waiting.items() if entrance.get(owner or "") == event]:
            del waiting[weight]
            yield weight
        yield event
    yield from waiting


def _owner(weight: str, modules: set[str]) -> str | None:
    """The nearest called module above a weight."""
    owner = weight.rpartition(".")[0]
    while owner and owner not in modules:
        owner = owner.rpartition(".")[0]
    return owner or None


class _Judge:
    def __init__(self, reference_trace: ReferenceTrace, dtype: str, axes: Mapping[str, int], called: set[str]) -> None:
        self.known, self.dtype, self.axes, self.called = reference_trace, dtype, axes, called

    def event(
        self,
        phase: str,
        event: Event,
        want: np.ndarray,
        pieces: Mapping[int, np.ndarray],
        positions: Positions,
    ) -> Line:
        by_rank = {rank: positions(rank, event, want.shape, piece.shape) for rank, piece in pieces.items()}
        kind = "value" if phase == "forward" else "gradient"
        pairs = {
            rank: (piece, None if at is None else want[np.ix_(*at)])
            for (rank, piece), at in zip(pieces.items(), by_rank.values(), strict=True)
        }
        side = _side(event) if phase == "forward" else f"gradient of the {_side(event)}"
        home = event.home(phase, self.called)
        earlier = self._earlier(event) if phase == "forward" else NONE

        def before(rank: int) -> dict[str, np.ndarray]:
            at = by_rank[rank]
            return {} if at is None else {name: full[np.ix_(*at)] for name, full in earlier.items()}

        line = self._line(side, phase, home, pairs, want, self.known.spread[kind, event], before=before)
        return replace(line, event=event)

    def _earlier(self, event: Event) -> dict[str, np.ndarray]:
        """The tensors of the event's shape that the reference had before it, the latest first."""
        values = list(self.known.values.items())
        index = [each for each, _ in values].index(event)
        shape = self.known.values[event].shape
        return {_side(each): full for each, full in reversed(values[:index]) if full.shape == shape}

    def weight(self, name: str, got: np.ndarray, by_rank: Mapping[str, np.ndarray], at: Mapping[str, int]) -> Line:
        want = self.known.of_weights[name]
        pairs = {0: (got, want if got.shape == want.shape else None)}
        home = _owner(name, self.called) or name.rpartition(".")[0]
        spread = self.known.spread["weight", name]
        return self._line(f"gradient of {name}", "weight", home, pairs, want, spread, by_rank, at)

    def number(self, name: str, phase: str, numbers: Sequence[Mapping[str, float]]) -> list[Line]:
        """The line of a number made by the model itself; none if the ranks were not asked for it."""
        want = self.known.numbers[name]
        pairs = {rank: (np.array(each[name]), want) for rank, each in enumerate(numbers) if name in each}
        return [self._line(name, phase, "", pairs, want, self.known.spread["number", name])] if pairs else []

    def _line(
        self,
        name: str,
        phase: str,
        home: str,
        pairs: Mapping[int, tuple[np.ndarray, np.ndarray | None]],
        full: np.ndarray,
        spread: float,
        by_rank: Mapping[str, np.ndarray] = NONE,
        at: Mapping[str, int] = NONE,
        before: Callable[[int], Mapping[str, np.ndarray]] = lambda rank: NONE,
    ) -> Line:
        budget = K * (spread + UNIT_ROUNDOFF[self.dtype])
        finite = full[np.isfinite(full)]
        size = max(float(np.linalg.norm(finite)), float(np.finfo(np.float64).tiny))
        errors = {rank: _apart(*pair) / size for rank, pair in pairs.items()}
        wrong = tuple(rank for rank, error in errors.items() if not error <= budget)
        notes: tuple[str, ...] = ()
        if full.size and (not finite.size or not math.isfinite(budget)):
            wrong, notes = tuple(pairs), ("the reference is not finite here, so that nothing can be compared",)
        elif wrong:
            worst = max(wrong, key=lambda rank: errors[rank])
            got, want = pairs[worst]
            known = {"by_rank": by_rank, "at": at, "inputs": before(worst)}
            notes = (ANOTHER_SHAPE,) if want is None else self._notes(name, phase, got, want, budget, known)
        return Line(name, phase, home, max(errors.values()), budget, wrong, notes)

    def _notes(
        self, name: str, phase: str, got: np.ndarray, want: np.ndarray, budget: float, known: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """The kind of mistake, judged from one rank's piece; each element gets a share of the tensor's budget."""
        share = ELEMENT * budget * float(np.linalg.norm(want)) / math.sqrt(max(want.size, 1))
        role = "output" if phase == "forward" else "gradient"
        # A surplus addition on each of two ranks and one addition too many are the same number.
        several = frozenset(axis for axis, ranks in self.axes.items() if ranks > 2)
        known = {"coarse_dtype": self.dtype, "summed_axes": several, **known}
        notes = explain(Evidence(name, role, got, want, np.full(want.shape, share), self.axes, **known))
        return tuple(note for note in notes if want.ndim or not note.startswith("no pattern"))  # a number has no place


def _side(event: Event) -> str:
    call = f", call {event.call}" if event.call else ""
    return f"{'input' if event.end == IN else 'output'} of {event.module or THE_MODEL}{call}"


def _apart(got: np.ndarray, want: np.ndarray | None) -> float:
    """The distance; infinities and NaN must be in the same places and then count as 0."""
    if want is None or got.shape != want.shape:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float(np.linalg.norm(np.where(same_number(got, want), 0.0, got - want)))
    return apart if math.isfinite(apart) else math.inf
