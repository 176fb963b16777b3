"""Draws that depend on the seed alone, whatever else the process has imported.

Hypothesis mixes into its draws constants that it reads from the source of every local module in `sys.modules`. The
cases of one seed would then differ between two files of the same user, and between a run of one scheme and a run of
all. Sizes, meshes and options come from lists, where such constants stand for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

_BACKEND = "hypothesis"


class _WithoutConstants(HypothesisProvider):
    """Hypothesis's provider, without the constants that it mixes into numbers, text and bytes."""

    def _maybe_draw_constant(self, *_: Any, **__: Any) -> None:
        return None


def make_draws_reproducible() -> None:
    """From here on every search of Hypothesis in this process draws the same for the same seed; for a conftest."""
    AVAILABLE_PROVIDERS[_BACKEND] = _WithoutConstants


@contextmanager
def reproducible_draws() -> Iterator[None]:
    """Within it every search of Hypothesis draws the same for the same seed, in any process."""
    before = AVAILABLE_PROVIDERS[_BACKEND]
    make_draws_reproducible()
    try:
        yield
    finally:
        AVAILABLE_PROVIDERS[_BACKEND] = before
