"""The case that shows how a scheme is sharded, and the pictures on the declared meshes, which are stored.

A case that is drawn for a verdict may have one rank, or a rank without a position: edges worth a test, and no picture.
"""

from __future__ import annotations

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
    given = {axis: size for axis, size in sizes.items() if axis in scheme.mesh}
    for mesh in sorted(meshes(scheme, given, None), key=_several_ranks_first):
        best, most = None, -1
        for seed in range(SEEDS):
            with suppress(ValueError):  # no shape goes with this mesh, or with these sizes
                case = one_case(scheme, seed=seed, **{**mesh, **sizes})
                if (positions := _fewest_positions(scheme, case)) > most:
                    best, most = case, positions
            if best is None or most >= ENOUGH:
                break
        if best is not None:
            return best
    return one_case(scheme, **sizes)


def _several_ranks_first(mesh: Mapping[str, int]) -> tuple[int, int]:
    return -sum(size > 1 for size in mesh.values()), math.prod(mesh.values())


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
    declared = meshes(scheme, {}, None)[:MOST_MESHES]
    parts = {part for mesh in declared for n in range(len(mesh) + 1) for part in combinations(mesh.items(), n)}
    pictures = {}
    for part in sorted(parts):
        sizes: dict[str, Any] = dict(part)
        with suppress(ValueError):  # no case has these sizes
            pictures[sizes_key(sizes)] = scheme_picture(scheme, pictured_case(scheme, sizes))
    return pictures
