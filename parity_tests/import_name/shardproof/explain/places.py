"""Clues from places: which elements are wrong and on which rank; right values in wrong places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from jax_ref.layouts import contiguous, dual_chunk_swap, indivisible, striped
from shardproof.explain.arithmetic import fitted_change, named_change
from shardproof.explain.evidence import Evidence
from shardproof.explain.note import ACROSS_MESHES, ACROSS_SIZES, Note
from shardproof.judge.compare import index_text

NO_PATTERN = "no pattern"
ALL_THERE = "all elements there"
NOT_FINITE = "not finite first at "


def non_finite_elements(evidence: Evidence) -> Iterator[Note]:
    """NaN or infinity where the reference is finite, or finite numbers where it is not."""
    unexpected = evidence.is_wrong & ~np.isfinite(evidence.got)
    if unexpected.any():
        yield Note(f"{NOT_FINITE}{_first_place(evidence, unexpected)}")
    finite = evidence.is_wrong & np.isfinite(evidence.got) & ~np.isfinite(evidence.want)
    if finite.any():
        reference = evidence.want[finite].flat[0]
        yield Note(f"finite where the reference is {reference}, first at {_first_place(evidence, finite)}")


def wrong_region(evidence: Evidence) -> Iterator[Note]:
    """All wrong elements belong to one rank, or lie at borders of one kind; or all right ones belong to one rank.

    A region is named only if it is smaller than the ones before.
    """
    smallest_size = evidence.got.size
    for region in chain(_owned_regions(evidence), _of_several_owners(evidence), _border_regions(evidence)):
        if region.mask.sum() < smallest_size:
            smallest_size = int(region.mask.sum())
            yield _region_note(evidence, region)
    for axis, ranks in evidence.owners.items():
        wrong, right = np.unique(ranks[evidence.is_wrong]), np.unique(ranks[~evidence.is_wrong])
        if len(right) == 1 and len(wrong) > 1 and right[0] not in wrong:
            text, fits = f"right only where {axis} rank {int(right[0])} owns", partial(_is_right_only_where, axis=axis)
            yield Note(text, ACROSS_SIZES, text, fits=partial(fits, rank=int(right[0])))


class Region(NamedTuple):
    """A region that contains all wrong elements: its words, and its note's tests of other cases."""

    words: str
    mask: np.ndarray
    applies: Callable[[Evidence], bool] | None
    fits: Callable[[Evidence], bool]


def _owned_regions(evidence: Evidence) -> Iterator[Region]:
    single_owners = {}
    for axis, ranks in evidence.owners.items():
        wrong = np.unique(ranks[evidence.is_wrong])
        if len(wrong) == 1 and (ranks != wrong[0]).any():
            single_owners[axis] = int(wrong[0])
    if single_owners:
        who = " and ".join(f"{axis} rank {rank}" for axis, rank in single_owners.items())
        words = f"wrong only where {who} {'owns' if len(single_owners) == 1 else 'own'}"
        fits = partial(_is_wrong_only_where, ranks=single_owners)
        yield Region(words, _is_owned_by(evidence, single_owners), None, fits)


def _of_several_owners(evidence: Evidence) -> Iterator[Region]:
    """The ranks of an axis that have nothing right, if several others have nothing wrong."""
    for axis, ranks in evidence.owners.items():
        wrong, right = np.unique(ranks[evidence.is_wrong]), np.unique(ranks[~evidence.is_wrong])
        if len(wrong) > 1 and len(right) > 1 and not np.intersect1d(wrong, right).size:
            mask, numbers = np.isin(ranks, wrong), [str(rank) for rank in wrong]
            words = f"wrong only where {axis} ranks {', '.join(numbers[:-1])} and {numbers[-1]} own"
            yield Region(words, mask, None, partial(_is_wrong_only_on, axis=axis, ranks=frozenset(wrong.tolist())))


def _border_regions(evidence: Evidence) -> Iterator[Region]:
    for name, mask in evidence.borders.items():
        if _is_wrong_only_at(evidence, name):
            applies, fits = (partial(f, name=name) for f in (_has_border, _is_wrong_only_at))
            yield Region(f"wrong only at {name}", mask, applies, fits)


def _is_owned_by(evidence: Evidence, ranks: Mapping[str, int]) -> np.ndarray:
    return np.logical_and.reduce([evidence.owners[axis] == rank for axis, rank in ranks.items()])


def _is_wrong_only_where(evidence: Evidence, ranks: Mapping[str, int]) -> bool:
    return not (evidence.is_wrong & ~_is_owned_by(evidence, ranks)).any()


def _is_wrong_only_on(evidence: Evidence, axis: str, ranks: frozenset[int]) -> bool:
    return not (evidence.is_wrong & ~np.isin(evidence.owners[axis], sorted(ranks))).any()


def _is_right_only_where(evidence: Evidence, axis: str, rank: int) -> bool:
    return bool((evidence.is_wrong | (evidence.owners[axis] == rank)).all())


def _has_border(evidence: Evidence, name: str) -> bool:
    """Whether the border exists and leaves some elements out."""
    return name in evidence.borders and not evidence.borders[name].all()


def _is_wrong_only_at(evidence: Evidence, name: str) -> bool:
    return name in evidence.borders and not (evidence.is_wrong & ~evidence.borders[name]).any()


LEAST_CHANGED = 4  # elements: fewer may be multiples of the reference's by chance


def changed_elements(evidence: Evidence) -> Iterator[Note]:
    """One number explains all wrong elements, at most half of the tensor: a few rows, or parameters of a vector."""
    wrong = evidence.restricted_to(evidence.is_wrong)
    if not _may_be_a_change(evidence) or not wrong.got.any() or any(wrong_region(evidence)):
        return
    if not wrong.differs(wrong.want, slack=2.0).all():  # an error of rounding is near the budget somewhere
        return
    number_note = next(chain(named_change(wrong), fitted_change(wrong)), None)
    if number_note is not None:
        first = index_text(tuple(int(i) for i in np.argwhere(evidence.is_wrong)[0]))
        where = f"right except {evidence.wrong_count} of {evidence.got.size} elements, first at {first}"
        claims = {f"elsewhere right: {claim}": words for claim, words in number_note.claims.items()}
        weaker = {f"elsewhere right: {claim}" for claim in number_note.implied}
        yield Note(f"{where}; there {number_note}", ACROSS_SIZES, claims, weaker, applies=_may_be_a_change)


def _may_be_a_change(evidence: Evidence) -> bool:
    """Whether enough elements are wrong, and enough are right."""
    return LEAST_CHANGED <= evidence.wrong_count <= evidence.got.size // 2


def worst_element(evidence: Evidence) -> Note:
    """The element with the largest error, in budgets."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        budgets = np.abs(evidence.got - evidence.want) / evidence.budgets
    ratio = np.where(evidence.is_wrong, np.nan_to_num(budgets, nan=np.inf, posinf=np.inf), -np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    holders = [f"{axis} rank {ranks[index]}" for axis, ranks in evidence.owners.items()]
    return Note(f"{NO_PATTERN}; worst at {index_text(index)}" + (f", owner {', '.join(holders)}" if holders else ""))


def _region_note(evidence: Evidence, region: Region) -> Note:
    """The number of wrong elements in the region, and the number that explains them."""
    where, inside = region.words, evidence.restricted_to(region.mask)
    size = inside.got.size
    count = ALL_THERE if inside.wrong_count == size else f"{inside.wrong_count} of {size} elements there"
    number_note = next(chain(named_change(inside), fitted_change(inside)), None)
    text = f"{where} ({count})"
    if number_note is None:
        return Note(text, ACROSS_SIZES, where, applies=region.applies, fits=region.fits)
    claims = {f"{where}: {claim}": words for claim, words in number_note.claims.items()}
    weaker = {where, *(f"{where}: {claim}" for claim in number_note.implied)}
    text = f"{text}; there {number_note}"
    return Note(text, ACROSS_SIZES, claims, weaker, region.applies, fits=region.fits)


def _first_place(evidence: Evidence, mask: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(mask)[0])
    return index_text(index) + _rank_text(evidence, index)


def _rank_text(evidence: Evidence, index: tuple[int, ...]) -> str:
    """The global rank that holds an element if all its coordinates are known, else the known coordinates."""
    at = {axis: int(ranks[index]) for axis, ranks in evidence.owners.items()} | dict(evidence.at)
    coordinate = {axis: at[axis] for axis in evidence.axes if axis in at}
    if evidence.axes and len(coordinate) == len(evidence.axes):
        coordinates, sizes = tuple(coordinate.values()), tuple(evidence.axes.values())
        return f", rank {int(np.ravel_multi_index(coordinates, sizes))}"
    return "".join(f", {axis} rank {rank}" for axis, rank in coordinate.items())


SAME_VALUES = "same values in another order"
ORDER_OF = f"{SAME_VALUES}, the order of "  # another call, or memory; a layout has other words
_SAME_VALUES = f"{SAME_VALUES}: a layout is not undone, or applied twice"
_BUILT_IN_LAYOUTS = {"contiguous": contiguous, "dual_chunk_swap": dual_chunk_swap, "striped": striped}


def another_order(evidence: Evidence) -> Iterator[Note]:
    """The layout that gives the values' order, by name; else only that the values are the same."""
    if evidence.got.size < 2:
        return
    for dim in range(evidence.got.ndim):
        for axis, world in evidence.axes.items():
            for permutation, words in _candidate_orders(evidence, dim, axis, world):
                if _is_permuted(evidence, dim, permutation):
                    yield Note(f"{_SAME_VALUES}; {words}", ACROSS_MESHES, words, {_SAME_VALUES})
                    return
    if _same_values(evidence):
        yield Note(_SAME_VALUES, ACROSS_MESHES, _SAME_VALUES)


def _candidate_orders(evidence: Evidence, dim: int, axis: str, world: int) -> Iterator[tuple[np.ndarray, str]]:
    """Orders that the positions of a dim may have, `got = want[order]`, each with its meaning."""
    size, name = evidence.got.shape[dim], evidence.dim(dim)
    of_dim = [placed for placed in evidence.layouts if placed.dim == dim]
    declared = of_dim[0] if len(of_dim) == 1 and of_dim[0].axis == axis else None
    declared_order = np.concatenate(declared.positions) if declared else np.arange(size)
    for layout, stream in _layout_orders(evidence, size, axis, world).items():
        if declared is None:
            yield stream, f"{name} is still in {layout} order over {axis}"
            yield np.argsort(stream), f"{name} is in the inverse of {layout} order over {axis}"
            yield stream[stream], f"{name} went through {layout} twice over {axis}"
        elif not np.array_equal(stream, declared_order):
            words = f"{name} is in {layout} order over {axis}, not in {declared.layout} order"
            yield stream[np.argsort(declared_order)], words
    if declared is not None:
        yield declared_order, f"{name} went through {declared.layout} twice over {axis}"


def _layout_orders(evidence: Evidence, size: int, axis: str, world: int) -> dict[str, np.ndarray]:
    """Layout -> the positions of rank 0, rank 1, ... concatenated, for each layout that can shard this size."""
    if world < 2:
        return {}
    positions_of = {sharded.layout: sharded.positions for sharded in evidence.layouts if sharded.axis == axis}
    for name, layout in {**evidence.custom_layouts, **_BUILT_IN_LAYOUTS}.items():
        if name not in positions_of and indivisible("size", size, axis, world, name) is None:
            with suppress(
                Exception
            ):  # a custom layout may reject a size with any exception; then it is not a candidate
                positions_of[name] = layout(size, world)
    streams = {
        name: np.concatenate([np.asarray(h, np.int64) for h in positions]) for name, positions in positions_of.items()
    }
    return {name: stream for name, stream in streams.items() if np.array_equal(np.sort(stream), np.arange(size))}


def _is_permuted(evidence: Evidence, dim: int, permutation: np.ndarray) -> bool:
    want, budget = np.take(evidence.want, permutation, dim), np.take(evidence.budgets, permutation, dim)
    moved = Evidence(evidence.name, evidence.role, evidence.got, want, budget, max_finite=evidence.max_finite)
    return moved.wrong_count == 0


def _same_values(evidence: Evidence) -> bool:
    """Sorted values agree, and most wrong elements are too far from other values for a coincidence."""
    got, want = np.sort(evidence.got, axis=None), evidence.want.ravel()
    order = np.argsort(want)
    budget = evidence.budgets.ravel()[order]
    if Evidence(evidence.name, evidence.role, got, want[order], budget, max_finite=evidence.max_finite).wrong_count:
        return False
    values = np.unique(want[np.isfinite(want)])
    finite = evidence.is_wrong & np.isfinite(evidence.want)
    wrong, budget = evidence.want[finite], evidence.budgets[finite]
    place = np.searchsorted(values, wrong)
    padded = np.concatenate([[-np.inf], values, [np.inf]])
    apart = np.minimum(wrong - padded[place], padded[place + 2] - wrong) >= 2 * budget
    return 2 * int(apart.sum()) >= len(wrong)


MIN_ROWS = 2  # rows with two errors each, as two errors in a single row are always at some distance


def wrong_offset(evidence: Evidence) -> Iterator[Note]:
    """Rows along the last dim have two opposite errors each, at one distance: a term is in the wrong place.

    Rows with one error are accepted: the right or the wrong place of the term is beyond the end of the row. Rows of two
    elements, such as a softmax of two, are skipped: every error that keeps their sum is such a pair.
    """
    if not _is_sparse(evidence):
        return
    width = evidence.want.shape[-1]
    is_wrong = evidence.is_wrong.reshape(-1, width)
    with np.errstate(invalid="ignore"):
        residual = np.where(evidence.is_wrong, evidence.got - evidence.want, 0.0).reshape(is_wrong.shape)
    slack = evidence.budgets.reshape(is_wrong.shape)
    distances = []
    for row in np.flatnonzero(is_wrong.any(axis=1)):
        places = np.flatnonzero(is_wrong[row])
        if len(places) == 2:
            if abs(residual[row, places].sum()) > slack[row, places].sum():
                return
            distances.append(int(places[1] - places[0]))
    if len(distances) >= MIN_ROWS and len(set(distances)) == 1:
        along = evidence.dim(evidence.want.ndim - 1)
        text = f"a term sits {distances[0]} place{'s' if distances[0] > 1 else ''} off along {along}"
        yield Note(f"{text}: an offset is wrong by {distances[0]}", ACROSS_SIZES, text, applies=_is_sparse)


def _is_sparse(evidence: Evidence) -> bool:
    """Whether pairs of errors could be moved terms: rows of more than two elements, none with more than two errors."""
    if (
        evidence.want.ndim == 0
        or evidence.want.shape[-1] <= 2
        or not np.isfinite(evidence.got[evidence.is_wrong]).all()
    ):
        return False
    in_row = evidence.is_wrong.sum(axis=-1).ravel()
    return int((in_row == 2).sum()) >= MIN_ROWS and int(in_row.max(initial=0)) <= 2
