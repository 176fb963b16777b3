"""Find the place of each rank's piece in the full tensor, from the pieces alone: a plain tensor has no record of it.

Each mesh axis shards one dim by one of the usual layouts, repeats the tensor, or holds terms of a sum. Of all
placements that the shapes allow, the nearest to the reference is taken. A wrong piece is far from it in all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jax_ref import layouts

REPEATED, TERMS = None, "terms"
LAYOUTS = (layouts.ragged, layouts.dual_chunk_swap, layouts.striped)  # ragged: DTensor's blocks, with shorter last ones
Pieces = Mapping[int, np.ndarray]
Places = Sequence[Mapping[str, int]]  # each rank's coordinate on each axis


@dataclass(frozen=True)
class Placed:
    """The pieces to compare (each the sum of its terms), and the indices in each dim that a rank holds.

    `summed` lists the axes with terms.
    """

    pieces: dict[int, np.ndarray]
    positions: dict[int, list[np.ndarray] | None]
    summed: tuple[str, ...] = ()

    def distance(self, full: np.ndarray) -> float:
        """The farthest piece's distance from the full tensor; infinite if the shapes do not fit."""
        return max(
            float(np.linalg.norm(np.nan_to_num(piece - full[np.ix_(*at)], nan=np.inf)))
            if (at := self.positions[rank]) is not None
            else np.inf
            for rank, piece in self.pieces.items()
        )


def placed(full: np.ndarray, pieces: Pieces, places: Places, axes: Mapping[str, int], *, may_sum: bool) -> Placed:
    """The nearest placement; the pieces unchanged if none fits. `axes` are the axes with more than one rank."""
    nearest = Placed(dict(pieces), dict.fromkeys(pieces))
    shortest = np.inf
    for candidate in _candidates(full.shape, pieces, places, axes, may_sum):
        distance = candidate.distance(full)
        if distance < shortest or (shortest == np.inf and nearest.positions[min(pieces)] is None):
            nearest, shortest = candidate, distance
    return nearest


def same(placement: Placed, pieces: Pieces, places: Places) -> Placed:
    """Other pieces of the same shapes, placed alike: a gradient is placed like its weight."""
    return Placed(
        {rank: _total(pieces, rank, placement.summed, places) for rank in pieces}, placement.positions, placement.summed
    )


def _candidates(
    shape: tuple[int, ...], pieces: Pieces, places: Places, axes: Mapping[str, int], may_sum: bool
) -> Iterator[Placed]:
    """All placements that the shapes allow, plain replicas first."""
    if any(piece.ndim != len(shape) for piece in pieces.values()):
        return
    dims = [dim for dim, size in enumerate(shape) if any(piece.shape[dim] != size for piece in pieces.values())]
    ends: list[Any] = [REPEATED, *([TERMS] if may_sum else []), *dims]
    for choice in itertools.product(ends, repeat=len(axes)):
        by_axis = dict(zip(axes, choice, strict=True))
        if set(dims) - set(choice):
            continue
        for layout in LAYOUTS if dims else LAYOUTS[:1]:
            positions = {
                rank: _positions(shape, piece.shape, by_axis, places[rank], axes, layout)
                for rank, piece in pieces.items()
            }
            if any(at is None for at in positions.values()):
                continue
            summed = tuple(axis for axis, end in by_axis.items() if end == TERMS)
            yield same(Placed(dict(pieces), positions, summed), pieces, places)


def _positions(
    shape: tuple[int, ...],
    local: tuple[int, ...],
    by_axis: Mapping[str, Any],
    place: Mapping[str, int],
    axes: Mapping[str, int],
    layout: Any,
) -> list[np.ndarray] | None:
    """The indices in each dim; None if the piece has another shape.

    Of several axes on one dim, the first shards first.
    """
    result = []
    for dim, size in enumerate(shape):
        sharding = [axis for axis, end in by_axis.items() if end == dim]
        count = prod(axes[axis] for axis in sharding)
        at = 0
        for axis in sharding:
            at = at * axes[axis] + place[axis]
        indices = np.arange(size) if count == 1 else _shard(size, count, at, layout)
        if indices is None or len(indices) != local[dim]:
            return None
        result.append(indices)
    return result


def _shard(size: int, count: int, at: int, layout: Any) -> np.ndarray | None:
    """One rank's indices; None if the layout cannot shard the size."""
    try:
        return np.asarray(layout(size, count)[at])
    except ValueError:
        return None


def _total(pieces: Pieces, rank: int, summed: Sequence[str], places: Places) -> np.ndarray:
    """The sum over the ranks that differ from this one only on the summed axes."""
    if not summed:
        return pieces[rank]
    rest = {axis: at for axis, at in places[rank].items() if axis not in summed}
    return np.sum([piece for other, piece in pieces.items() if rest.items() <= places[other].items()], axis=0)


def in_full(full: np.ndarray, placement: Placed, rank: int) -> np.ndarray:
    """The reference with this rank's piece inserted; the piece itself if it fits nowhere."""
    at = placement.positions[rank]
    if at is None:
        return placement.pieces[rank]
    result = np.array(full)
    result[np.ix_(*at)] = placement.pieces[rank]
    return result


def farthest(full: np.ndarray, placement: Placed) -> np.ndarray:
    """`in_full` of the rank with the piece farthest from the reference."""
    return in_full(full, placement, farthest_rank(full, placement))


def farthest_rank(full: np.ndarray, placement: Placed) -> int:
    """The rank with the piece farthest from the reference; a rank with a piece that fits nowhere, if there is one."""

    def distance(rank: int) -> float:
        array = in_full(full, placement, rank)
        return float(np.linalg.norm(np.nan_to_num(array - full, nan=np.inf))) if array.shape == full.shape else np.inf

    return max(placement.pieces, key=distance)


def repeated(
    full: np.ndarray, placement: Placed, places: Places, axes: Mapping[str, int], at: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """For each axis that repeats a piece of the tensor, the pieces of its ranks, stacked.

    Each is put into an equal share of the reference, so that their sum is the reference beyond the piece.
    """
    by_axis = {}
    for axis, size in axes.items():
        ranks = [
            rank for rank, place in enumerate(places) if all(place[name] == at[name] for name in at if name != axis)
        ]
        held = [placement.positions.get(rank) for rank in ranks]
        first = held[0]
        if first is not None and all(each is not None and same_indices(each, first) for each in held):
            by_axis[axis] = np.stack([in_full(full / size, placement, rank) for rank in ranks])
    return by_axis


def same_indices(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether two pieces hold the same indices in each dim."""
    return all(map(np.array_equal, one, other))
