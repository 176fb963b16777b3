"""Compare a step of the ranks with the reference's step: each difference, next to its rounding budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardproof.judge.compare import K
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.training.precision import STORED_DTYPE
from shardproof.training.record import GRADIENT, WEIGHT, Step
from shardproof.training.reference import ReferenceStep

# The largest relative budget in a float64 run, as promised for 20 steps on any mesh.
PROMISED = 1e-9


@dataclass(frozen=True)
class Row:
    """The relative distance of one number or one full tensor from the reference, and its budget."""

    error: float
    budget: float

    @property
    def ratio(self) -> float:
        return self.error / self.budget

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0


@dataclass(frozen=True)
class Judged:
    """One judged step: rows by name, `loss`, `norm`, `gradient/NAME` and `weight/NAME` in the model's order."""

    index: int
    loss: float
    want: float
    rows: dict[str, Row]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows.values())

    @property
    def worst_ratio(self) -> float:
        return max(row.ratio for row in self.rows.values())

    def worst(self, kind: str) -> tuple[str, Row]:
        """The name and row with the largest share of its budget, among gradients or weights."""
        of_kind = {name: row for name, row in self.rows.items() if name.startswith(kind)}
        name = max(of_kind, key=lambda name: of_kind[name].ratio)
        return name.removeprefix(kind), of_kind[name]

    @property
    def wrong(self) -> list[str]:
        return [name for name, row in self.rows.items() if not row.ok]


def judged(step: Step, reference_step: ReferenceStep, dtype: str) -> Judged:
    """Compare every number of a step. A name that only one side has counts as infinitely far away."""
    want, pairs = reference_step.step, {}
    pairs["loss"] = np.array(step.loss), np.array(want.loss)
    pairs["norm"] = np.array(step.norm), np.array(want.norm)
    for kind, got, reference in ((GRADIENT, step.gradients, want.gradients), (WEIGHT, step.weights, want.weights)):
        pairs |= {kind + name: (got.get(name), reference.get(name)) for name in {**reference, **got}}
    rows = {}
    for name, pair in pairs.items():
        last = dtype if name.startswith(GRADIENT) else STORED_DTYPE[dtype]
        rows[name] = Row(distance(*pair), budget(reference_step.spread.get(name, 0.0), last))
    return Judged(want.index, step.loss, want.loss, rows)


def budget(spread: float, dtype: str) -> float:
    """K times the sum of the reference's spread by rounding and the number's own last rounding, in `dtype`."""
    allowed = K * (spread + UNIT_ROUNDOFF[dtype])
    return min(allowed, PROMISED) if dtype == "float64" else allowed


def distance(got: np.ndarray | None, want: np.ndarray | None) -> float:
    """|got - want| / |want| in the Euclidean norm."""
    if got is None or want is None or got.shape != want.shape:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float(np.linalg.norm(got - want))
    size = max(float(np.linalg.norm(want)), float(np.finfo(np.float64).tiny))
    return apart / size if math.isfinite(apart) else math.inf
