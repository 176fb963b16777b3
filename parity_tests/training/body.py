"""The function that travels to the ranks. It imports what it calls there, where everything of this project is."""

from __future__ import annotations

from typing import Any


def train(mesh: Any, case: Any) -> list[float]:
    """See `ranks.train`."""
    from parity_tests.training import ranks

    return ranks.train(mesh, case)


def trace(mesh: Any, case: Any) -> Any:
    """See `ranks.trace`."""
    from parity_tests.training import ranks

    return ranks.trace(mesh, case)
