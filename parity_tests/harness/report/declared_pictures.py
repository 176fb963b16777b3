"""The case that shows how a scheme is sharded, and the pictures on the declared meshes, which are stored.

A case that is drawn for a verdict may have one rank, or a rank without a position: edges worth a test, and no picture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.declare.declared import Declared
from parity_tests.harness.declare.scheme_index import sizes_key
from parity_tests.harness.draw.drawing import one_case
from parity_tests.harness.draw.size_choices import meshes
from parity_tests.harness.report.picture import scheme_picture, scheme_strips

MOST_MESHES = 12  # of a scheme
SEEDS = 6  # cases of one mesh, among which the most telling is chosen
ENOUGH = 2  # positions of a dim that a rank has


def pictured_case(scheme: Declared, sizes: Mapping[str, Any]) -> CaseSpec:
    """A case with these sizes on the smallest mesh that has several ranks on the most axes, each rank with positions.

    Errors: ValueError as of draw_case.
    """
    for mesh in _meshes_with(scheme, {axis: size for axis, size in sizes.items() if axis in scheme.mesh}):
        if (case := _telling_case(scheme, {**mesh, **sizes})) is not None:
            return case
    return one_case(scheme, **sizes)


def _meshes_with(scheme: Declared, given: Mapping[str, int]) -> list[dict[str, int]]:
    return sorted(
        meshes(scheme, given, None),
        key=lambda mesh: (-sum(size > 1 for size in mesh.values()), math.prod(mesh.values())),
    )


def _telling_case(scheme: Declared, sizes: Mapping[str, Any]) -> CaseSpec | None:
    """Of a few cases of these sizes, the one whose poorest rank has the most positions; None if there is no case."""
    best, most = None, -1
    for seed in range(SEEDS):
        with suppress(ValueError):  # no shape goes with this mesh, or with these sizes
            case = one_case(scheme, seed=seed, **sizes)
            if (positions := _fewest_positions(scheme, case)) > most:
                best, most = case, positions
        if best is None or most >= ENOUGH:
            break
    return best


def _fewest_positions(scheme: Declared, case: CaseSpec) -> int:
    """Of the rank that has the fewest of a sharded dim, at most `ENOUGH`."""
    fewest = ENOUGH
    for _, spec, strips in scheme_strips(scheme, case):
        shardings = [sharding for dim in spec.dims for sharding in dim.shardings]
        for sharding, strip in zip(shardings, strips, strict=True):
            positions = np.bincount(strip.owners, minlength=case.mesh[sharding.axis])
            fewest = min(fewest, int(positions.min()))
    return fewest


def declared_pictures(scheme: Declared) -> Mapping[str, str]:
    """The picture for each part of each declared mesh, as sizes may be given for some of its axes; by `sizes_key`."""

    @functools.cache
    def picture_on(*mesh: tuple[str, int]) -> str | None:
        case = _telling_case(scheme, dict(mesh))
        return None if case is None else scheme_picture(scheme, case)

    declared = meshes(scheme, {}, None)[:MOST_MESHES]
    parts = {part for mesh in declared for n in range(len(mesh) + 1) for part in combinations(mesh.items(), n)}
    pictures = {}
    for part in sorted(parts):
        on_meshes = (picture_on(*mesh.items()) for mesh in _meshes_with(scheme, dict(part)))
        if (picture := next(filter(None, on_meshes), None)) is not None:
            pictures[sizes_key(dict(part))] = picture
    return pictures
