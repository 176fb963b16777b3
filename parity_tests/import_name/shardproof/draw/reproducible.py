"""Draws that depend only on the seed, whatever the process has imported.

Hypothesis mixes constants into its draws that it reads from the source of every local module in `sys.modules`. The
cases of one seed would then differ between two files of the same user, and between running one scheme and all. Sizes,
meshes and options come from lists, where such constants are meaningless. Hypothesis also stores these constants in a
folder `.hypothesis` in the working directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture.providers import HypothesisProvider


def make_draws_reproducible() -> None:
    """From now on every Hypothesis search in this process depends only on its seed; for a conftest."""
    HypothesisProvider._maybe_draw_constant = _no_constant


@contextmanager
def reproducible_draws() -> Iterator[None]:
    """Inside the block every Hypothesis search depends only on its seed, in any process."""
    before = HypothesisProvider._maybe_draw_constant
    make_draws_reproducible()
    try:
        yield
    finally:
        HypothesisProvider._maybe_draw_constant = before


def _no_constant(*_: Any, **__: Any) -> None:
    """Replaces the method of the class, because Hypothesis also creates instances outside its table of providers."""
    return None
