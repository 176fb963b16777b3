"""Clues in the places: which elements are wrong, and who holds them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from parity_tests.harness.explain.arithmetic import fitted_number, known_number
from parity_tests.harness.explain.evidence import Evidence


def not_finite(evidence: Evidence) -> Iterator[str]:
    """A NaN or infinity that the reference lacks, or lacks here what the reference has."""
    strange = evidence.bad & ~np.isfinite(evidence.got)
    if strange.any():
        poisoned = evidence.poison and np.isnan(evidence.got[strange]).all()
        early = f"; read before its wait: {evidence.poison}" if poisoned else ""
        yield f"not finite first at {_first(evidence, strange)}{early}"
    tame = evidence.bad & np.isfinite(evidence.got) & ~np.isfinite(evidence.want)
    if tame.any():
        reference = evidence.want[tame].flat[0]
        yield f"finite where the reference is {reference}, first at {_first(evidence, tame)}"


def narrowest(evidence: Evidence) -> Iterator[str]:
    """All that is wrong is what one rank owns, or lies at borders of one kind; a wider place adds nothing."""
    smallest = evidence.got.size
    for words, region in chain(_owned(evidence), _at_borders(evidence)):
        if region.sum() < smallest:
            smallest = int(region.sum())
            yield words + _there(evidence, region)
    for axis, ranks in evidence.owners.items():
        wrong, right = np.unique(ranks[evidence.bad]), np.unique(ranks[~evidence.bad])
        if len(right) == 1 and len(wrong) > 1 and right[0] not in wrong:
            yield f"right only where {axis} rank {int(right[0])} owns"


def _owned(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    found = []
    for axis, ranks in evidence.owners.items():
        wrong = np.unique(ranks[evidence.bad])
        if len(wrong) == 1 and (ranks != wrong[0]).any():
            found.append((axis, int(wrong[0])))
    if found:
        region = np.logical_and.reduce([evidence.owners[axis] == rank for axis, rank in found])
        who = " and ".join(f"{axis} rank {rank}" for axis, rank in found)
        yield f"wrong only where {who} {'owns' if len(found) == 1 else 'own'}", region


def _at_borders(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    for name, mask in evidence.borders.items():
        if not (evidence.bad & ~mask).any():
            yield f"wrong only at {name}", mask


def worst(evidence: Evidence) -> str:
    """Where the error is the most budgets."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        budgets = np.abs(evidence.got - evidence.want) / evidence.budget
    ratio = np.where(evidence.bad, np.nan_to_num(budgets, nan=np.inf, posinf=np.inf), -np.inf)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    holders = [f"{axis} rank {ranks[index]}" for axis, ranks in evidence.owners.items()]
    return f"no pattern; worst at {_written(index)}" + (f", owner {', '.join(holders)}" if holders else "")


def _there(evidence: Evidence, region: np.ndarray) -> str:
    """How many are wrong in the region, and the relation that holds there."""
    inside = evidence.only(region)
    count = "all of its" if inside.wrong == inside.got.size else f"{inside.wrong} of its {inside.got.size}"
    relation = next(chain(known_number(inside), fitted_number(inside)), None)
    return f" ({count} elements)" + (f"; there {relation}" if relation else "")


def _first(evidence: Evidence, mask: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(mask)[0])
    return _written(index) + _rank(evidence, index)


def _rank(evidence: Evidence, index: tuple[int, ...]) -> str:
    """The global rank that holds an element where all its coordinates are known, else those that are."""
    at = {axis: int(ranks[index]) for axis, ranks in evidence.owners.items()} | dict(evidence.at)
    known = {axis: at[axis] for axis in evidence.axes if axis in at}
    if evidence.axes and len(known) == len(evidence.axes):
        coordinates, sizes = tuple(known.values()), tuple(evidence.axes.values())
        return f", rank {int(np.ravel_multi_index(coordinates, sizes))}"
    return "".join(f", {axis} rank {rank}" for axis, rank in known.items())


def _written(index: tuple[int, ...]) -> str:
    return f"({','.join(map(str, index))})"
