"""The declared cost of a scheme on one mesh, on links: one candidate per choice of the options that affect it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.cost.evaluated import busiest, costs_of_ranks
from shardproof.cost.links import Price, price
from shardproof.cost.placement import placement
from shardproof.cost.sheet import Sheet
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Cost, Declared
from shardproof.declare.draws import Chooser
from shardproof.draw.choosers import seeded_chooser, simplest
from shardproof.draw.drawing import priced_case

PHASES = ("forward", "backward")
MOST = 64  # candidates per scheme
PREFERRED = "bfloat16"
GIVE_COST = 'give scheme(...) cost=lambda case: Cost(forward={"all_reduce": (calls, bytes)}), with Cost from shardproof'


@dataclass(frozen=True)
class Setting:
    """Shared by all candidates: the mesh in order of ranks, sizes and options by name, sheet, dtype, seed.

    The mesh may have axes that a scheme does not use: they only determine the hosts of the other axes' groups. `seed`
    draws the lengths of ragged shards and packed sequences; without it they are the standard ones, DTensor's shards and
    one sequence.
    """

    mesh: Mapping[str, int]
    names: Mapping[str, Any]
    sheet: Sheet
    dtype: str | None = None
    seed: int | None = None

    @property
    def chooser(self) -> Chooser:
        return simplest if self.seed is None else seeded_chooser(self.seed)


@dataclass(frozen=True)
class Line:
    """One op in one phase: calls and bytes of the busiest rank, as in the ledger, and their price.

    Axis and price are None if a scheme with several axes does not declare the axis.
    """

    phase: str
    op: str
    axis: str | None
    calls: int
    size: int
    price: Price | None

    @property
    def name(self) -> str:
        return f"{self.op}/{self.axis}" if self.axis else self.op


@dataclass(frozen=True)
class Candidate:
    """A scheme with one choice of its options on one mesh. Seconds are per call, forward and backward."""

    label: str
    scheme: str
    case: CaseSpec
    mesh: Mapping[str, int]
    lines: tuple[Line, ...]
    products: tuple[int, int] | None = None
    product_seconds: Mapping[str, float] = field(default_factory=dict)  # by phase; empty without products
    seed: int | None = None  # of the drawn lengths

    @property
    def inside(self) -> float:
        return sum(line.price.inside for line in self.lines if line.price)

    @property
    def between(self) -> float:
        return sum(line.price.between for line in self.lines if line.price)

    def communication(self, phase: str) -> float:
        return sum(line.price.seconds for line in self.lines if line.price and line.phase == phase)

    def step(self, phase: str) -> float:
        """Products plus the communication that they do not hide: messages overlap with products, collectives do not."""
        products = self.product_seconds.get(phase, 0.0)
        messages = sum(
            line.price.seconds for line in self.lines if line.price and line.phase == phase and line.op == "send"
        )
        return self.communication(phase) - messages + max(products, messages)

    @property
    def seconds(self) -> float:
        return sum(self.step(phase) for phase in PHASES)

    @property
    def is_complete(self) -> bool:
        """Whether every op has a price."""
        return all(line.price for line in self.lines)


@dataclass
class Comparison:
    """The candidates on one mesh, and the reasons why others are missing."""

    setting: Setting
    candidates: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def least(self) -> Candidate | None:
        """The candidate with the shortest step; None if any op of a candidate has no price."""
        if not self.candidates or not all(candidate.is_complete for candidate in self.candidates):
            return None
        return min(self.candidates, key=lambda candidate: candidate.seconds)


def candidates(scheme: Declared, setting: Setting, label: str = "") -> Comparison:
    """One candidate for each choice of the rank options that affect communication.

    Other options take their first value.

    Errors: ValueError for a scheme without a declared cost, an axis missing in the mesh, an unknown name, and if no
    size fits.
    """
    if scheme.cost is None:
        raise ValueError(f"scheme '{scheme.name}': declares no cost; {GIVE_COST}")
    missing = [axis for axis in scheme.mesh if axis not in setting.mesh]
    if missing:
        axes = ", ".join(scheme.mesh)
        raise ValueError(f"--mesh lacks {missing[0]}: scheme '{scheme.name}' has the axes {axes}; give {missing[0]}=N")
    comparison = Comparison(setting)
    for choice in _choices(scheme, setting):
        name = " ".join([*filter(None, [label]), *(f"{option}={value}" for option, value in choice.items())])
        try:
            case = _case(scheme, setting, choice)
        except ValueError as reason:
            comparison.left_out[name or scheme.name] = str(reason).removeprefix(f"scheme '{scheme.name}': ")
            continue
        comparison.candidates.append(_candidate(name or scheme.name, scheme, case, setting))
    if not comparison.candidates and len(comparison.left_out) == 1:
        raise ValueError(f"scheme '{scheme.name}': {next(iter(comparison.left_out.values()))}")
    return comparison


def lines_of(cost: Cost, mesh: Mapping[str, int]) -> list[tuple[str, str, str | None, int, int]]:
    """(phase, op, axis, calls, bytes) of a cost, with bytes as in the ledger.

    An op without an axis belongs to the only axis with several ranks, or to the only axis.
    """
    several = [axis for axis, size in mesh.items() if size > 1] or list(mesh)
    only = several[0] if len(several) == 1 else None
    return [
        (phase, op, axis or only, calls, size)
        for phase in PHASES
        for (op, axis), (calls, size) in cost.by_axis(phase).items()
        if calls or size
    ]


def _case(scheme: Declared, setting: Setting, choice: Mapping[str, Any]) -> CaseSpec:
    dtype = setting.dtype or (PREFERRED if PREFERRED in scheme.dtypes else scheme.dtypes[0])
    mesh = {axis: size for axis, size in setting.mesh.items() if axis in scheme.mesh}
    ordered = {axis: mesh[axis] for axis in scheme.mesh}
    fixed = {**setting.names, **choice}
    return priced_case(scheme, setting.chooser, ordered, fixed, dtype=dtype, seed=setting.seed or 0)


def _choices(scheme: Declared, setting: Setting) -> list[dict[str, Any]]:
    """The choices of free rank options that change the cost, each varied by itself; at most MOST."""
    alternatives: dict[str, tuple[Any, ...]] = {}
    for name, values in scheme.rank_options.items():
        if name in setting.names or len(values) < 2:
            continue
        costs = []
        for value in values:
            try:
                costs.append(costs_of_ranks(scheme, _case(scheme, setting, {name: value})))
            except ValueError:
                costs.append(None)  # not for these sizes, which is a difference as well
        if any(cost != costs[0] for cost in costs):
            alternatives[name] = values
    combinations = itertools.product(*alternatives.values())
    return [dict(zip(alternatives, values, strict=True)) for values in itertools.islice(combinations, MOST)]


def _candidate(label: str, scheme: Declared, case: CaseSpec, setting: Setting) -> Candidate:
    sheet = setting.sheet
    places = {axis: placement(setting.mesh, axis, sheet.ranks_per_host) for axis in case.mesh}
    declared, lines = busiest(costs_of_ranks(scheme, case)), []
    for phase, op, axis, calls, size in lines_of(declared, case.mesh):
        if axis is not None and axis not in places:
            raise ValueError(f"scheme '{scheme.name}': its cost names {op}/{axis}; the axes are {', '.join(places)}")
        cost = None if axis is None else price(op, calls, size, places[axis], sheet)
        lines.append(Line(phase, op, axis, calls, size, cost))
    products = declared.products
    seconds: dict[str, float] = {}
    if products is not None and sheet.operations_per_second:
        seconds = {phase: count / sheet.operations_per_second for phase, count in zip(PHASES, products, strict=True)}
    return Candidate(label, scheme.name, case, setting.mesh, tuple(lines), products, seconds, setting.seed)
