"""What the parallelizer promises of every parameter, and the sentence that says which one breaks it and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# |a - b| / |b| of each parameter's gradient, and of each parameter after three steps of AdamW, in float64.
PROMISED = 1e-10


def deviation(got: Any, want: Any) -> float:
    """|got - want| / |want|; what is 0 by the mathematics has to be 0."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return np.inf
    size, wrong = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(wrong / size) if size else float(np.inf if wrong else 0.0)


def broken(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """One sentence for each name that deviates by more than is promised, the worst first."""
    if set(got) != set(want):
        return [f"{sorted(set(want) - set(got))} are missing, {sorted(set(got) - set(want))} are unknown"]
    found = {name: deviation(got[name], want[name]) for name in want}
    worst = sorted((name for name in found if not found[name] <= PROMISED), key=found.__getitem__, reverse=True)
    return [f"{name} is {found[name]:.1e} off{_factor(got[name], want[name])}" for name in worst]


def broken_on_ranks(ranks: Sequence[Mapping[str, Any]], want: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
    """The same of what each rank of a mesh holds whole; a sum over an axis that was not taken is named."""
    sentences = [f"rank {rank}: {said}" for rank, got in enumerate(ranks) for said in broken(got, want)[:1]]
    if not sentences or any(set(got) != set(want) for got in ranks):
        return sentences
    grid = np.arange(len(ranks)).reshape(tuple(mesh.values()))
    for name in want:
        if deviation(ranks[0][name], want[name]) <= PROMISED:
            continue
        for axis, (label, size) in enumerate(mesh.items()):
            summed = sum(np.asarray(ranks[rank][name]) for rank in np.moveaxis(grid, axis, 0).reshape(size, -1)[:, 0])
            if size > 1 and deviation(summed, want[name]) <= PROMISED:
                sentences.append(f"{name} misses a sum over {label}")
    return sentences


def _factor(got: Any, want: Any) -> str:
    """` by the factor 2`, where one number explains all of it."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.vdot(want, want):
        return f": {got.shape} for {want.shape}" if got.shape != want.shape else ""
    factor = float(np.vdot(got, want) / np.vdot(want, want))
    return f" by the factor {factor:.6g}" if deviation(got, factor * want) <= PROMISED else ""
