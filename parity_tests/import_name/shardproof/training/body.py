"""The functions that are sent to the ranks. They import the rest of the project on the rank."""

from __future__ import annotations

from importlib import import_module
from typing import Any

RANKS = "shardproof.training.ranks"  # a name, so that each call uses the module that is imported at that time


def train(mesh: Any, case: Any) -> list[float]:
    """See `ranks.train`."""
    return import_module(RANKS).train(mesh, case)


def trace(mesh: Any, case: Any) -> Any:
    """See `ranks.trace`."""
    return import_module(RANKS).trace(mesh, case)
