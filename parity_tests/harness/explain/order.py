"""Clues in the order: the right values in the wrong places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from jax_ref.layouts import contiguous, dual_chunk_swap, striped, uncuttable
from parity_tests.harness.explain.evidence import Evidence

_HEADLINE = "same values in another order: a layout is not undone, or applied twice"
_TRIED = {"contiguous": contiguous, "dual_chunk_swap": dual_chunk_swap, "striped": striped}


def another_order(evidence: Evidence) -> Iterator[str]:
    """A layout that mends it, by name; else only that the values are the same."""
    if evidence.got.size < 2:
        return
    for dim in range(evidence.got.ndim):
        for axis, world in evidence.axes.items():
            for permutation, words in _permutations(evidence, dim, axis, world):
                if _is_permuted(evidence, dim, permutation):
                    yield f"{_HEADLINE}; {words}"
                    return
    if _same_values(evidence):
        yield _HEADLINE


def _permutations(evidence: Evidence, dim: int, axis: str, world: int) -> Iterator[tuple[np.ndarray, str]]:
    """Orders in which the positions of a dim may stand, `got = want[order]`, and what each would mean."""
    size, name = evidence.got.shape[dim], evidence.dim(dim)
    own = [placed for placed in evidence.layouts if placed.dim == dim]
    declared = own[0] if len(own) == 1 and own[0].axis == axis else None
    straight = np.arange(size)
    stands = np.concatenate(declared.positions) if declared else straight
    for layout, stream in _streams(evidence, size, axis, world).items():
        if declared is None:
            yield stream, f"{name} is still in {layout} order over {axis}"
            yield np.argsort(stream), f"{name} is in the inverse of {layout} order over {axis}"
            yield stream[stream], f"{name} went through {layout} twice over {axis}"
        elif not np.array_equal(stream, stands):
            words = f"{name} is in {layout} order over {axis}, not in {declared.layout} order"
            yield stream[np.argsort(stands)], words
    if declared is not None:
        yield stands, f"{name} went through {declared.layout} twice over {axis}"


def _streams(evidence: Evidence, size: int, axis: str, world: int) -> dict[str, np.ndarray]:
    """Layout to the positions of rank 0, rank 1, ... end to end, for each layout that can cut this size."""
    if world < 2:
        return {}
    pieces = {p.layout: p.positions for p in evidence.layouts if p.axis == axis}
    for name, layout in {**evidence.candidates, **_TRIED}.items():
        if name not in pieces and uncuttable("size", size, axis, world, name) is None:
            with suppress(Exception):  # a custom layout may refuse a size in its own way; then it explains nothing
                pieces[name] = layout(size, world)
    streams = {name: np.concatenate([np.asarray(h, np.int64) for h in held]) for name, held in pieces.items()}
    return {name: stream for name, stream in streams.items() if np.array_equal(np.sort(stream), np.arange(size))}


def _is_permuted(evidence: Evidence, dim: int, permutation: np.ndarray) -> bool:
    want, budget = np.take(evidence.want, permutation, dim), np.take(evidence.budget, permutation, dim)
    moved = Evidence(evidence.name, evidence.role, evidence.got, want, budget, largest=evidence.largest)
    return moved.wrong == 0


def _same_values(evidence: Evidence) -> bool:
    """Sorted values agree, and most wrong elements differ enough from other values for that to mean something."""
    got, want = np.sort(evidence.got, axis=None), evidence.want.ravel()
    order = np.argsort(want)
    budget = evidence.budget.ravel()[order]
    if Evidence(evidence.name, evidence.role, got, want[order], budget, largest=evidence.largest).wrong:
        return False
    values = np.unique(want[np.isfinite(want)])
    finite = evidence.bad & np.isfinite(evidence.want)
    wrong, room = evidence.want[finite], evidence.budget[finite]
    place = np.searchsorted(values, wrong)
    padded = np.concatenate([[-np.inf], values, [np.inf]])
    apart = np.minimum(wrong - padded[place], padded[place + 2] - wrong) >= 2 * room
    return 2 * int(apart.sum()) >= len(wrong)
