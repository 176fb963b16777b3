"""The page of the docs that says how near each mesh came: a list of runs, and their table."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from parity_tests.training.judged import Judged, Row
from parity_tests.training.record import GRADIENT, WEIGHT
from parity_tests.training.run import DTYPES, Run

MESHES: tuple[tuple[dict[str, int], str, str], ...] = (
    ({}, "hidden", "ring"),
    ({"dp_shard": 2}, "hidden", "ring"),
    ({"dp_replicate": 2}, "hidden", "ring"),
    ({"cp": 2}, "hidden", "ring"),
    ({"cp": 2}, "state", "ulysses"),
    ({"tp": 2}, "hidden", "ring"),
    ({"cp": 3}, "hidden", "ulysses"),
    ({"cp": 3}, "state", "ring"),
    ({"dp_shard": 4}, "hidden", "ring"),
    ({"cp": 4}, "state", "all_gather"),
    ({"cp": 4}, "hidden", "ring"),
    ({"dp_replicate": 2, "dp_shard": 2}, "hidden", "ring"),
    ({"dp_shard": 2, "cp": 2}, "hidden", "ring"),
    ({"dp_replicate": 2, "cp": 2}, "state", "ulysses"),
    ({"dp_shard": 2, "tp": 2}, "hidden", "ring"),
    ({"cp": 2, "tp": 2}, "state", "ulysses"),
)
HEAD = """# Training on {count} meshes

{steps} steps of the same run on every mesh, each step compared with one device; see [how to train](how-to/train.md).
Errors are the largest of all steps, relative, in the norm of a tensor; *of budget* is the largest share of its budget
that any number took.

Written by `shardproof train --page docs/training.md`{stamp}.

| mesh | Mamba2 | attention | dtype | loss | norm | gradients | weights | of budget | verdict |
|---|---|---|---|---|---|---|---|---|---|
"""


def runs(**settings: object) -> list[Run]:
    """Every mesh in float64, then in float32."""
    return [
        Run(mesh=mesh, mamba=mamba, attention=attention, **{**settings, "dtype": dtype})  # pyright: ignore[reportArgumentType]
        for dtype in DTYPES
        for mesh, mamba, attention in MESHES
    ]


def write(done: Sequence[tuple[Run, Sequence[Judged]]], path: str) -> None:
    """The page of finished runs."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "optax"))
    stamp = f" on {date.today().isoformat()} with Python {platform.python_version()}, {versions}"
    count = len({tuple(run.mesh.items()) for run, _ in done})
    head = HEAD.format(count=count, steps=max(run.steps for run, _ in done), stamp=stamp)
    Path(path).write_text(head + "".join(_line(run, steps) for run, steps in done))


def _line(run: Run, steps: Sequence[Judged]) -> str:
    axes = " ".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one rank"
    errors = [max(_largest(step, kind) for step in steps) for kind in ("loss", "norm", GRADIENT, WEIGHT)]
    share = max(step.worst_ratio for step in steps)
    verdict = "equal" if all(step.ok for step in steps) else "**mismatch**"
    cells = [axes, run.mamba, run.attention, run.dtype, *(f"{error:.1e}" for error in errors), f"{share:.2g}", verdict]
    return f"| {' | '.join(cells)} |\n"


def _largest(step: Judged, kind: str) -> float:
    rows: list[Row] = [row for name, row in step.rows.items() if name.startswith(kind)]
    return max(row.error for row in rows)
