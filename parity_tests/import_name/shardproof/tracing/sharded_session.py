"""One call of `shardproof trace FILE::sharded --twin FILE::single --inputs FILE::inputs`.

The twin runs in this process, on one device in float64; the sharded model runs on an engine's ranks. Each module's
output and gradients, and each parameter's gradient, are compared in order of execution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from shardproof.declare.case import ENGINES, LARGEST_WORLD, CaseSpec
from shardproof.declare.discover import UnusableTarget
from shardproof.declare.targets import absolute
from shardproof.draw.inputs import coordinates
from shardproof.endings.raised import first_line_of, pass_interrupt
from shardproof.engines.engines import run as on_ranks
from shardproof.engines.failure import RankFailure
from shardproof.engines.ledger import at_users_line
from shardproof.judge import bridge
from shardproof.judge.compare import K
from shardproof.judge.reference import UNIT_ROUNDOFF, ReferenceFailure
from shardproof.report.guard import own_output
from shardproof.report.out_path import check_writable
from shardproof.tracing import show
from shardproof.tracing.comparison import Found, Line, lines, whole
from shardproof.tracing.events import LOSS, OUT, Event
from shardproof.tracing.placed import Placed, farthest, farthest_rank, in_full, placed, repeated, same
from shardproof.tracing.reaching import inner_differences
from shardproof.tracing.sharded_rank import RankTrace, call, cast, drawn_cotangent, dtype_of, function_of, leaves
from shardproof.tracing.torch_side import Recording
from shardproof.tracing.twin_side import TwinTrace, traced

HERE = tuple(engine for engine in ENGINES if engine != "torchrun")
QUIET_S = 120.0  # a rank first imports the user's file and its imports
LIKE = "on one device"
RANKS = "shardproof.tracing.sharded_rank"


@dataclass(frozen=True)
class Question:
    """The request: functions as `file.py::name`, the mesh and the engine."""

    sharded: str
    twin: str
    inputs: str
    mesh: Mapping[str, int]
    dtype: str | None = None
    engine: str = "gloo"
    seed: int = 0

    def case(self, dtype: str, shape: tuple[int, ...]) -> CaseSpec:
        """The case sent to the ranks."""
        targets = {"sharded": absolute(self.sharded), "inputs": absolute(self.inputs)}
        options = {**targets, "seed": self.seed, "dtype": self.dtype}
        return CaseSpec("trace", self.mesh, dtype=dtype, options={**options, "shape": list(shape)}, engine=self.engine)


def trace(question: Question, json: str | None, is_whole: bool, quiet: bool) -> int:
    """Trace, print, and return the exit status.

    Errors: UnusableTarget for a missing function; ValueError for a wrong result of one; ReferenceFailure if the twin
    raises.
    """
    _check(question)
    check_writable(json=json)
    bridge.start()
    with own_output():
        report = _traced(question)
    show.print_report(show.console(json), report, is_whole, quiet)
    return show.write([report], json)


def _traced(question: Question) -> show.TraceReport:
    twin = _twin(question)
    title = f"{question.sharded.partition('::')[2]}  {_mesh_text(question.mesh)}  {twin.dtype}"
    try:
        case = question.case(twin.dtype, twin.trace.shape)
        ranks = on_ranks(body, case, question.engine, quiet_s=QUIET_S).results
    except RankFailure as failure:
        return show.TraceReport(title, LIKE, failure=failure)
    return _report(title, twin, ranks, question.mesh)


def body(mesh: Any, case: Any) -> Any:
    """Sent to the ranks; see `sharded_rank.trace`."""
    return import_module(RANKS).trace(mesh, case)


@dataclass(frozen=True)
class _Twin:
    trace: TwinTrace
    dtype: str


def _check(question: Question) -> None:
    if question.engine not in HERE:
        raise ValueError(f"--engine {question.engine!r} is not one of {', '.join(HERE)}")
    if question.dtype is not None and question.dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"--dtype {question.dtype!r} is not one of {', '.join(UNIT_ROUNDOFF)}")
    if not question.mesh:
        raise ValueError("--mesh is needed: a sharded model is built on a mesh, as in --mesh tp=2")
    world = int(np.prod(list(question.mesh.values())))
    if world > LARGEST_WORLD:
        raise ValueError(f"--mesh has {world} ranks; the limit is {LARGEST_WORLD}")
    for target in (question.sharded, question.twin, question.inputs):
        function_of(target)


def _twin(question: Question) -> _Twin:
    torch.manual_seed(question.seed)
    module = _called(question.twin, function_of(question.twin))
    if not isinstance(module, nn.Module):
        raise UnusableTarget(f"{question.twin}: returned {type(module).__name__}; return a torch.nn.Module")
    dtype = question.dtype or dtype_of(module)
    if dtype not in UNIT_ROUNDOFF:
        raise UnusableTarget(f"{question.twin}: has parameters of {dtype}, not one of {', '.join(UNIT_ROUNDOFF)}")
    torch.manual_seed(question.seed)
    inputs = _called(question.inputs, function_of(question.inputs))
    if not isinstance(inputs, Mapping | tuple | list):
        kind = type(inputs).__name__
        raise UnusableTarget(f"{question.inputs}: returned {kind}; return a tuple of arguments, or a dict of keywords")
    tensors = [x for x in leaves(inputs) if isinstance(x, torch.Tensor)]
    if tensors and not any(x.numel() for x in tensors):
        problem = "returned tensors without an element, and nothing could differ"
        raise UnusableTarget(f"{question.inputs}: {problem}; return a token or more")
    float64_inputs = cast(cast(inputs, getattr(torch, dtype)), torch.float64)
    cotangent = partial(drawn_cotangent, seed=question.seed)
    forward = partial(call, inputs=float64_inputs)
    of_twin = _called(question.twin, traced, module, forward, cotangent, dtype, question.seed)
    if 0 in of_twin.shape:
        raise UnusableTarget(f"{question.twin}: its output has no element, and nothing could differ")
    return _Twin(of_twin, dtype)


def _called(target: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Errors: ReferenceFailure for the user's own exception, with its line."""
    try:
        return function(*arguments)
    except BaseException as error:
        pass_interrupt(error)
        first = f"{type(error).__name__}: {first_line_of(error)}"
        raise ReferenceFailure(f"{target}: raised {first}{at_users_line(error)}") from error


def _report(title: str, twin: _Twin, ranks: tuple[RankTrace, ...], mesh: Mapping[str, int]) -> show.TraceReport:
    comparison = _Comparison(twin, ranks, mesh)
    every_line = [*comparison.start(), *comparison.steps()]
    aside = inner_differences(every_line)
    compared = [line for line in every_line if line not in aside]
    reference_names = set(twin.trace.weights) | {event.module for event in twin.trace.reference.values}
    mine = set().union(*({*rank.weights, *(event.module for event in rank.recording.values)} for rank in ranks))
    return show.TraceReport(
        title,
        LIKE,
        compared,
        torch_only=tuple(sorted(mine - reference_names)),
        flax_only=tuple(sorted(reference_names - mine)),
        sides=("the sharded model", "its twin"),
        sums=tuple(comparison.sums),
        inner=tuple(line.name for line in aside),
    )


@dataclass
class _Comparison:
    """The ranks' arrays and the reference's. `sums` lists the tensors that the ranks hold as terms of a sum."""

    twin: _Twin
    ranks: tuple[RankTrace, ...]
    mesh: Mapping[str, int]
    sums: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = coordinates(self.mesh)
        self._by_rank: dict[str, dict[str, np.ndarray]] = {}
        self._at: dict[str, dict[str, int]] = {}
        self._axes = {axis: size for axis, size in self.mesh.items() if size > 1}
        self._weights = {
            name: placed(full, pieces, self._places, self._axes, may_sum=False)
            for name, full in self.twin.trace.weights.items()
            if (pieces := {r: rank.weights[name] for r, rank in enumerate(self.ranks) if name in rank.weights})
        }

    def start(self) -> list[Line]:
        """Lines for initial weights that differ, because nothing after them could be equal."""
        budget = K * UNIT_ROUNDOFF[self.twin.dtype]
        result = []
        for name, placement in self._weights.items():
            full = self.twin.trace.weights[name]
            size = max(float(np.linalg.norm(full)), float(np.finfo(np.float64).tiny))
            errors = {rank: _apart(in_full(full, placement, rank), full) / size for rank in placement.pieces}
            wrong = tuple(rank for rank, error in errors.items() if not error <= budget)
            if wrong:
                notes = (SEEDED,) if placement.positions[wrong[0]] is not None else ("has another shape",)
                home = name.rpartition(".")[0]
                result.append(Line(f"weight {name}", "start", home, max(errors.values()), budget, wrong, notes))
        return result

    def steps(self) -> list[Line]:
        reference = self.twin.trace.reference
        recordings = [Recording() for _ in self.ranks]
        for event, full in reference.values.items():
            self._add(recordings, "values", event, full)
            self._add(recordings, "gradients", event, reference.gradients[event])
        numbers = [{} if rank.loss is None else {LOSS: rank.loss} for rank in self.ranks]
        trace = Found(recordings, self._of_weights(), numbers, self._by_rank, self._at)
        return lines(reference, trace, whole, self.twin.dtype, self._axes)

    def _add(self, recordings: list[Recording], kind: str, event: Event, full: np.ndarray) -> None:
        """Insert every rank's piece into the full tensor, to compare it in its place."""
        pieces = {
            r: getattr(rank.recording, kind)[event]
            for r, rank in enumerate(self.ranks)
            if event in getattr(rank.recording, kind)
        }
        if not pieces:
            return
        placement = placed(full, pieces, self._places, self._axes, may_sum=True)
        if placement.summed:
            end = "output" if event.end == OUT else "input"
            of = "gradient of the " if kind == "gradients" else ""
            self.sums.append(f"{of}{end} of {event.module} over {', '.join(placement.summed)}")
        for rank in pieces:
            getattr(recordings[rank], kind)[event] = in_full(full, placement, rank)

    def _of_weights(self) -> dict[str, np.ndarray]:
        """The gradients of the weights that require one, each placed like its weight."""
        result = {}
        for name, placement in self._weights.items():
            pieces = {r: rank.gradients[name] for r, rank in enumerate(self.ranks) if name in rank.with_gradient}
            if pieces.keys() == placement.pieces.keys():
                alike: Placed = same(placement, pieces, self._places)
                full = self.twin.trace.reference.of_weights[name]
                result[name], at = farthest(full, alike), dict(self._places[farthest_rank(full, alike)])
                self._by_rank[name], self._at[name] = repeated(full, alike, self._places, self._axes, at), at
        return result


SEEDED = (
    "the two models start with different weights: build both after one torch.manual_seed, or load one state into both"
)


def _apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want)) if got.shape == want.shape else np.inf


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
