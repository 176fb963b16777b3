"""Kinds of failure outside the ranks, in a scheme's reference, draw or condition: the sentence names only a line."""

from __future__ import annotations

import os
import sys
from typing import Any

from numpy.random import Generator

from shardproof.declaration import scheme
from shardproof.declare.draws import values
from shardproof.declare.more_draws import drawn

CALLS: list[int] = []


def declared(name: str, **how: Any) -> Any:
    """A scheme that is right except for the part that `how` declares."""

    def doubled(mesh: Any, x: Any) -> Any:
        return 2 * x

    doubled.__name__ = name
    right: dict[str, Any] = {
        "reference": lambda x: 2.0 * x, "mesh": {"tp": (2, 4)}, "inputs": {"x": "b/tp"}, "outputs": "b/tp",
        "draw": {"x": values("normal")}, "dtypes": ("float32",), "dims": {"b": (8,)},
    }  # fmt: skip
    return scheme(**right | how)(doubled)


def exits(x: Any) -> Any:
    sys.exit(0)


def leaves(x: Any) -> Any:
    os._exit(0)


def changes(x: Any) -> Any:
    CALLS.append(0)
    return 2.0 * x + len(CALLS)


def draws_nothing(generator: Generator, shape: tuple[int, ...]) -> Any:
    sys.exit(0)


def allows_nothing(case: Any) -> bool:
    sys.exit(0)


reference_exits = declared("reference_exits", reference=exits)
reference_leaves_by_os_exit = declared("reference_leaves_by_os_exit", reference=leaves)
reference_changes = declared("reference_changes", reference=changes)
draw_exits = declared("draw_exits", draw={"x": drawn(draws_nothing)})
assume_exits = declared("assume_exits", assume=allows_nothing)
