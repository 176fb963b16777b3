"""Draws that depend on the seed alone, whatever else the process has imported.

Hypothesis mixes into its draws constants that it reads from the source of every local module in `sys.modules`. The
cases of one seed would then differ between two files of the same user, and between a run of one scheme and a run of
all. Sizes, meshes and options come from lists, where such constants stand for nothing. What it reads it also stores,
in a folder `.hypothesis` where the command was called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture.providers import HypothesisProvider


def make_draws_reproducible() -> None:
    """From here on every search of Hypothesis in this process draws the same for the same seed; for a conftest."""
    HypothesisProvider._maybe_draw_constant = _no_constant


@contextmanager
def reproducible_draws() -> Iterator[None]:
    """Within it every search of Hypothesis draws the same for the same seed, in any process."""
    before = HypothesisProvider._maybe_draw_constant
    make_draws_reproducible()
    try:
        yield
    finally:
        HypothesisProvider._maybe_draw_constant = before


def _no_constant(*_: Any, **__: Any) -> None:
    """A method of the class, of which Hypothesis also makes instances that no table of providers names."""
    return None
