"""List the training runs for the docs page, and write the page with a table of their errors."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardproof.training.judged import Judged, Row
from shardproof.training.record import GRADIENT, WEIGHT
from shardproof.training.run import OPTIMIZERS, Run

DTYPES = ("float64", "float32")  # in these dtypes, every mesh is promised to be equal to one rank
# Rounding may change a token's experts, so runs with experts are promised to be equal in float64 only.
EXPERT_DTYPES = ("float64",)
STATE_ULYSSES = {"mamba": "state", "attention": "ulysses"}
# Each mesh with the settings that differ from a run's defaults.
MESHES: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({}, {}),
    ({"dp_shard": 2}, {}),
    ({"dp_replicate": 2}, {}),
    ({"cp": 2}, {}),
    ({"cp": 2}, STATE_ULYSSES),
    ({"tp": 2}, {}),
    ({"cp": 3}, {"attention": "ulysses"}),
    ({"cp": 3}, {"mamba": "state"}),
    ({"dp_shard": 4}, {}),
    ({"cp": 4}, {}),
    ({"cp": 4}, {"mamba": "state", "attention": "all_gather"}),
    ({"cp": 4}, {"attention": "usp"}),
    ({"dp_replicate": 2, "dp_shard": 2}, {}),
    ({"dp_shard": 2, "cp": 2}, {}),
    ({"dp_replicate": 2, "cp": 2}, STATE_ULYSSES),
    ({"dp_shard": 2, "tp": 2}, {}),
    ({"cp": 2, "tp": 2}, STATE_ULYSSES),
    ({"pp": 2}, {}),
    ({"pp": 2}, {"schedule": "zbv"}),
    ({"pp": 2}, {"schedule": "interleaved1f1b"}),
    ({"pp": 4}, {}),
    ({"pp": 2, "dp_shard": 2}, {"schedule": "zbv"}),
    ({"pp": 2, "dp_replicate": 2}, {}),
    ({"pp": 2, "cp": 2}, {}),
    ({"pp": 2, "cp": 2}, {"schedule": "zbv", **STATE_ULYSSES}),
    ({"pp": 2, "tp": 2}, {}),
    ({"pp": 2, "tp": 2}, {"schedule": "zbv"}),
    ({}, {"is_tied": True}),
    ({"pp": 2}, {"is_tied": True}),
    ({"pp": 2, "dp_shard": 2}, {"is_tied": True, "schedule": "zbv"}),
)
EXPERT_MESHES: tuple[dict[str, int], ...] = (
    {"ep": 1},
    {"ep": 2},
    {"ep": 4},
    {"dp_shard": 2, "ep": 2},
    {"ep": 2, "tp": 2},
    {"pp": 2, "ep": 2},
    {"cp": 2, "ep": 2},
)
HEAD = """# Training on {count} meshes

{steps} steps of the same run on every mesh, each step compared with one device; see [how to train](how-to/train.md).
An error is the norm of the difference divided by the norm of the tensor; the table has the largest error of all steps.
*of budget* is the largest ratio of an error to its budget.

Written by `shardproof train --page docs/training.md`{stamp}.

"""
COLUMNS = (
    *("mesh", "schedule", "Mamba2", "attention", "MLP", "head", "optimizer", "dtype"),
    *("loss", "norm", "gradients", "weights", "of budget", "verdict"),
)


def runs(**settings: Any) -> list[Run]:
    """All runs: each mesh in each dtype, float64 first; then runs with experts on their meshes, with each optimizer."""
    dense = [Run(mesh=mesh, **{**settings, **how, "dtype": dtype}) for dtype in DTYPES for mesh, how in MESHES]
    return dense + [
        Run(mesh=mesh, **{**settings, "has_experts": True, "optimizer": optimizer, "dtype": dtype})
        for dtype in EXPERT_DTYPES
        for optimizer in OPTIMIZERS
        for mesh in EXPERT_MESHES
    ]


def write(done: Sequence[tuple[Run, Sequence[Judged]]], path: str) -> None:
    """Write the page of finished runs."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "optax"))
    stamp = f" on {date.today().isoformat()} with Python {platform.python_version()}, {versions}"
    count = len({tuple(run.mesh.items()) for run, _ in done})
    head = HEAD.format(count=count, steps=max(run.steps for run, _ in done), stamp=stamp)
    head += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    Path(path).write_text(head + "".join(_line(run, steps) for run, steps in done), encoding="utf-8")


def _line(run: Run, steps: Sequence[Judged]) -> str:
    axes = " ".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one rank"
    errors = [max(_largest(step, kind) for step in steps) for kind in ("loss", "norm", GRADIENT, WEIGHT)]
    share = max(step.worst_ratio for step in steps)
    verdict = "equal" if all(step.ok for step in steps) else "**mismatch**"
    schedule = run.rule.name if run.is_staged else ""
    mlp, head = "experts" if run.has_experts else "dense", "tied" if run.is_tied else "own"
    setting = [schedule, run.mamba, run.attention, mlp, head, run.optimizer, run.dtype]
    cells = [axes, *setting, *(f"{error:.1e}" for error in errors), f"{share:.2g}", verdict]
    return f"| {' | '.join(cells)} |\n"


def _largest(step: Judged, kind: str) -> float:
    rows: list[Row] = [row for name, row in step.rows.items() if name.startswith(kind)]
    return max(row.error for row in rows)
