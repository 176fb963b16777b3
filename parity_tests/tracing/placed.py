"""Where in the full tensor each rank's piece belongs: found from the pieces, since a plain tensor does not say.

Each mesh axis shards one dim by one of the usual layouts, repeats the tensor, or holds terms of a sum. Of what the
shapes allow, that is taken which comes nearest to the reference. A wrong piece is near to none of them.
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
LAYOUTS = (layouts.ragged, layouts.dual_chunk_swap, layouts.striped)  # ragged: DTensor's blocks, the last ones shorter
Pieces = Mapping[int, np.ndarray]
Places = Sequence[Mapping[str, int]]  # each rank's coordinate on each axis


@dataclass(frozen=True)
class Placed:
    """The pieces to be compared, the sum of terms in place of each, and what indices of each dim a rank holds.

    `summed` are the axes whose ranks hold terms.
    """

    pieces: dict[int, np.ndarray]
    positions: dict[int, list[np.ndarray] | None]
    summed: tuple[str, ...] = ()

    def distance(self, full: np.ndarray) -> float:
        """From the full tensor, of the farthest piece; infinite where the shapes do not fit."""
        return max(
            float(np.linalg.norm(np.nan_to_num(piece - full[np.ix_(*at)], nan=np.inf)))
            if (at := self.positions[rank]) is not None
            else np.inf
            for rank, piece in self.pieces.items()
        )


def placed(full: np.ndarray, pieces: Pieces, places: Places, axes: Mapping[str, int], *, may_sum: bool) -> Placed:
    """The nearest placement; that of no change where none fits. `axes` are those of more than one rank."""
    nearest = Placed(dict(pieces), dict.fromkeys(pieces))
    shortest = np.inf
    for candidate in _candidates(full.shape, pieces, places, axes, may_sum):
        distance = candidate.distance(full)
        if distance < shortest or (shortest == np.inf and nearest.positions[min(pieces)] is None):
            nearest, shortest = candidate, distance
    return nearest


def same(placement: Placed, pieces: Pieces, places: Places) -> Placed:
    """Other pieces of the same shapes, placed alike; as those of a gradient are where those of a weight are."""
    return Placed(
        {rank: _total(pieces, rank, placement.summed, places) for rank in pieces}, placement.positions, placement.summed
    )


def _candidates(
    shape: tuple[int, ...], pieces: Pieces, places: Places, axes: Mapping[str, int], may_sum: bool
) -> Iterator[Placed]:
    """All that the shapes allow, plain replicas first."""
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
    """The indices of each dim; None where the piece has another shape. Of several axes, the first shards first."""
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
    """One rank's indices; None where the layout cannot shard the size."""
    try:
        return np.asarray(layout(size, count)[at])
    except ValueError:
        return None


def _total(pieces: Pieces, rank: int, summed: Sequence[str], places: Places) -> np.ndarray:
    """The sum over the ranks that differ from this one on the summed axes alone."""
    if not summed:
        return pieces[rank]
    rest = {axis: at for axis, at in places[rank].items() if axis not in summed}
    return np.sum([piece for other, piece in pieces.items() if rest.items() <= places[other].items()], axis=0)


def in_full(full: np.ndarray, placement: Placed, rank: int) -> np.ndarray:
    """The reference with this rank's piece in its place; the piece itself where it fits nowhere."""
    at = placement.positions[rank]
    if at is None:
        return placement.pieces[rank]
    result = np.array(full)
    result[np.ix_(*at)] = placement.pieces[rank]
    return result


def farthest(full: np.ndarray, placement: Placed) -> np.ndarray:
    """`in_full` of the rank whose piece is farthest from the reference."""
    arrays = [in_full(full, placement, rank) for rank in placement.pieces]
    odd = next((array for array in arrays if array.shape != full.shape), None)
    if odd is not None:
        return odd
    return max(arrays, key=lambda array: float(np.linalg.norm(np.nan_to_num(array - full, nan=np.inf))))
