"""Stitch the ranks' results into global arrays, by the layouts of the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.draw import inputs
from shardproof.engines.program import RankResult

SUMMED = {"output": "P", "gradient": "R"}


@dataclass(frozen=True)
class Stitched:
    """Global arrays assembled from the ranks' shards, one copy for each coordinate on the axes that replicate them."""

    copies: np.ndarray  # [repeats, *global shape]
    coordinates: tuple[dict[str, int], ...]  # of each copy, on the repeating axes
    summed_ranks: int
    parts: np.ndarray  # [*sizes of part_axes, *global shape]: before any sum
    part_axes: tuple[str, ...]  # repeating axes, then summed ones

    @property
    def size_of_terms(self) -> np.ndarray | float:
        """[*global shape]: the largest sum of |rank's term| over all copies; 0 if no ranks are summed.

        Each rank rounds its own term to the dtype that it returns, so terms that cancel leave their rounding errors.
        """
        if self.summed_ranks == 1:
            return 0.0
        count = len(self.copies)
        sizes = np.abs(self.parts.reshape(count, self.summed_ranks, *self.copies.shape[1:])).sum(1).max(0)
        return np.where(np.isfinite(sizes), sizes, 0.0)

    def by_rank(self, axis: str, at: Mapping[str, int]) -> np.ndarray:
        """[ranks of the axis, *global shape]: each rank's array. The other repeating axes have the coordinates `at`."""
        parts, names = self.parts, list(self.part_axes)
        for name in self.part_axes:
            if name != axis:
                index = names.index(name)
                parts = parts.take(at[name], axis=index) if name in at else parts.sum(axis=index)
                names.remove(name)
        return parts


def gradient_shards(scheme: Declared, arg: Argument, case: CaseSpec, results: Sequence[RankResult]) -> list[np.ndarray]:
    """Each rank's gradient of one input; zeros where it has none."""
    shards = []
    for at, result in zip(_ranks(case), results, strict=True):
        shard = result.gradients[arg.name]
        shards.append(np.zeros(inputs.local_shape(arg, case, at, scheme.layouts)) if shard is None else shard)
    return shards


def stitch(arg: Argument, shards: Sequence[np.ndarray], case: CaseSpec, custom: inputs.Layouts, role: str) -> Stitched:
    """Put shards back by the reference's layouts; sum over P axes of an output, over R axes of a gradient."""
    summed = [axis for axis, letter in arg.spec.types if letter == SUMMED[role]]
    repeating = [axis for axis in case.mesh if axis not in arg.spec.axes and axis not in summed]
    names = (*repeating, *summed)
    sizes = tuple(case.mesh[axis] for axis in names)
    parts = np.zeros((*sizes, *arg.shape(case)), dtype=np.asarray(shards[0]).dtype)
    for at, local in zip(_ranks(case), shards, strict=True):
        target = parts[(*(at[axis] for axis in names), ...)]  # a view even of a scalar
        local_positions = inputs.positions(arg, case, at, custom)
        target[np.ix_(*local_positions) if local_positions else ...] = local
    keys = list(np.ndindex(*sizes[: len(repeating)]))
    with np.errstate(invalid="ignore", over="ignore"):
        total = parts.sum(axis=tuple(range(len(repeating), len(names)))) if summed else parts
    coordinates = tuple(dict(zip(repeating, key, strict=True)) for key in keys)
    copies = total.reshape(len(keys), *arg.shape(case))
    return Stitched(copies, coordinates, math.prod(sizes[len(repeating) :]), parts, names)


def owners(arg: Argument, case: CaseSpec, custom: inputs.Layouts) -> dict[str, np.ndarray]:
    """Axis -> [*global shape]: each element's coordinate on the axis, for every axis that shards the tensor."""
    by_axis = {axis: np.zeros(arg.shape(case), dtype=np.int64) for axis in arg.spec.axes}
    for at in _ranks(case):
        local_positions = inputs.positions(arg, case, at, custom)
        for axis, array in by_axis.items():
            array[np.ix_(*local_positions)] = at[axis]
    return by_axis


def _ranks(case: CaseSpec) -> Sequence[Mapping[str, int]]:
    return inputs.coordinates(case.mesh)
