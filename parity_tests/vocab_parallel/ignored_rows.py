"""Drawn ids of which some are no token, and where they are. No JAX: ranks build their cotangents by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardproof import ids
from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument
from shardproof.declare.spec import parse
from shardproof.draw import inputs

SOME_IGNORED = ids("v", ignore=(-100, -1, 2**31 - 1))  # padding, and ids on either side of every vocabulary


def ignored(name: str, spec: str) -> Callable[[CaseSpec, tuple[int, ...]], np.ndarray]:
    """Where the ids of an input, drawn as SOME_IGNORED, are no tokens: a function of a case and a shape."""
    arg = Argument(name, parse(spec, ("tp",), differentiable=False), is_integer=True)

    def rows(case: CaseSpec, shape: tuple[int, ...]) -> np.ndarray:
        drawn = inputs.full_array(arg, SOME_IGNORED, case)
        return (drawn < 0) | (drawn >= case.v)

    return rows


IGNORED_TARGETS = ignored("target", "b s")
