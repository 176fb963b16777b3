"""A step of the ranks compared with the reference's: each distance, beside what rounding accounts for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardproof.judge.compare import K
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.training.precision import STORED_DTYPE
from shardproof.training.record import GRADIENT, WEIGHT, Step
from shardproof.training.reference import ReferenceStep

# No budget of a float64 run is wider than this, relative: the figure that is promised for 20 steps on any mesh.
PROMISED = 1e-9


@dataclass(frozen=True)
class Row:
    """Relative distance of one number or one full tensor from the reference's."""

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
    """One step: rows by name, `loss`, `norm`, `gradient/NAME` and `weight/NAME` in the order of the model."""

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
        """The row of a kind, gradient or weight, that is nearest its budget or furthest beyond."""
        of_kind = {name: row for name, row in self.rows.items() if name.startswith(kind)}
        name = max(of_kind, key=lambda name: of_kind[name].ratio)
        return name.removeprefix(kind), of_kind[name]

    @property
    def wrong(self) -> list[str]:
        return [name for name, row in self.rows.items() if not row.ok]


def judged(step: Step, reference_step: ReferenceStep, dtype: str) -> Judged:
    """Every number of a step. A name that only one side has is infinitely far away."""
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
    """K times what rounding moved the reference, and the last rounding of the number itself, which is in `dtype`."""
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
