"""A case that shows how a scheme is sharded, and stored pictures on the declared meshes.

A case drawn for a verdict may have one rank, or a rank without positions: good edge cases, but poor pictures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.declare.scheme_index import sizes_key
from shardproof.draw.drawing import one_case
from shardproof.draw.size_choices import meshes
from shardproof.report.picture import scheme_picture, scheme_strips

MAX_MESHES = 12  # meshes per scheme
SEEDS = 6  # cases tried per mesh, to find a case in which every rank has positions
ENOUGH = 2  # positions per rank at which the search stops


def pictured_case(scheme: Declared, sizes: Mapping[str, Any]) -> CaseSpec:
    """A case of these sizes on the smallest mesh with several ranks on most axes, in which each rank has positions.

    Errors: ValueError as in draw_case.
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
    """The best of a few cases with these sizes, judged by the rank with the fewest positions; None without a case."""
    best, most = None, -1
    for seed in range(SEEDS):
        with suppress(ValueError):  # no shape fits this mesh or these sizes
            case = one_case(scheme, seed=seed, **sizes)
            if (positions := _fewest_positions(scheme, case)) > most:
                best, most = case, positions
        if best is None or most >= ENOUGH:
            break
    return best


def _fewest_positions(scheme: Declared, case: CaseSpec) -> int:
    """The smallest number of positions that a rank has of any sharded dim, at most `ENOUGH`."""
    fewest = ENOUGH
    for _, spec, strips in scheme_strips(scheme, case):
        shardings = [sharding for dim in spec.dims for sharding in dim.shardings]
        for sharding, strip in zip(shardings, strips, strict=True):
            positions = np.bincount(strip.owners, minlength=case.mesh[sharding.axis])
            fewest = min(fewest, int(positions.min()))
    return fewest


def declared_pictures(scheme: Declared) -> Mapping[str, str]:
    """The picture for each subset of each declared mesh, because users may give only some axes; by `sizes_key`."""

    @functools.cache
    def picture_on(*mesh: tuple[str, int]) -> str | None:
        case = _telling_case(scheme, dict(mesh))
        return None if case is None else scheme_picture(scheme, case)

    declared = meshes(scheme, {}, None)[:MAX_MESHES]
    parts = {part for mesh in declared for n in range(len(mesh) + 1) for part in combinations(mesh.items(), n)}
    pictures = {}
    for part in sorted(parts):
        on_meshes = (picture_on(*mesh.items()) for mesh in _meshes_with(scheme, dict(part)))
        if (picture := next(filter(None, on_meshes), None)) is not None:
            pictures[sizes_key(dict(part))] = picture
    return pictures
