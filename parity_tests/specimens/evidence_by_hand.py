"""Evidence built by hand: the expected tensor, the actual one, and a budget relative to the expected one."""

from typing import Any

import numpy as np

from shardproof.explain.clues import explain
from shardproof.explain.evidence import Evidence

AXES = {"cp": 2, "tp": 4}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def evidence(got: Any, want: Any, relative: float = 2.0**-20, role: str = "output", **more: Any) -> Evidence:
    got, want = np.asarray(got, float), np.asarray(want, float)
    budget = np.where(np.isfinite(want), np.abs(want), 0.0) * relative + 1e-12
    return Evidence("x", role, got, want, budget, **{"axes": AXES, **more})


def headline(got: Any, want: Any, **more: Any) -> str:
    return explain(evidence(got, want, **more))[0]


def columns_of(shape: tuple[int, ...], world: int) -> np.ndarray:
    """The rank that owns each element where the last dim is sharded in equal blocks."""
    return np.broadcast_to(np.repeat(np.arange(world), shape[-1] // world), shape)
