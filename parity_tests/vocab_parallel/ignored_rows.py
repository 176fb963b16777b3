"""Drawn ids of which some are no token, and where they are. No JAX: ranks build their cotangents by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shardproof import CaseSpec, ids

SOME_IGNORED = ids("v", ignore=(-100, -1, 2**31 - 1))  # padding, and ids on either side of every vocabulary


def ignored(name: str) -> Callable[[CaseSpec, Mapping[str, np.ndarray]], np.ndarray]:
    """Where the ids of an input, drawn as SOME_IGNORED, are no tokens: a function of a case and its inputs."""
    return lambda case, inputs: (inputs[name] < 0) | (inputs[name] >= case.v)


IGNORED_TARGETS = ignored("target")
