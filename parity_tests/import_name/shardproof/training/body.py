"""The functions that travel to the ranks. They import what they call there, where everything of this project is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

RANKS = "shardproof.training.ranks"  # by its name, so that it is the one of the modules that are imported now


def train(mesh: Any, case: Any) -> list[float]:
    """See `ranks.train`."""
    return import_module(RANKS).train(mesh, case)


def trace(mesh: Any, case: Any) -> Any:
    """See `ranks.trace`."""
    return import_module(RANKS).trace(mesh, case)
