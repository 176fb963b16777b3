"""Clues from each rank's result: a missing or repeated sum, unequal copies, an addend of zeros, no gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardproof.explain.evidence import Evidence
from shardproof.explain.note import ACROSS_MESHES, ACROSS_SIZES, CONTEXT, Note

ZERO_ADDEND = "gave only zeros to the sum"
NO_GRADIENT = "no gradient was returned (None)"


def missing_or_repeated_sum(evidence: Evidence) -> Iterator[Note]:
    """Copies that add up to the reference lack a sum; addends that each equal the reference were summed once too often.

    Equal copies also add up if a sum was divided by the number of ranks; the note on the factor says the same.
    """
    for axis, values in _unsharded_axes(evidence):
        if axis not in evidence.at:
            if all(_is_right(evidence, value) for value in values):
                repeated = f"{evidence.role} summed over {axis} once too often"
                yield Note(f"{repeated}: each rank already has the reference{evidence.caveat}", ACROSS_MESHES, repeated)
        elif _adds_up(evidence, values) and not _are_equal(evidence, values):
            missing = missing_sum(evidence.role, axis)
            what = f"the ranks' {evidence.role}s add up to the reference"
            yield Note(f"{missing}: {what}{evidence.caveat}", ACROSS_MESHES, missing)


def missing_sum(role: str, axis: str) -> str:
    """The wording of a note on an output or a gradient whose parts on an axis's ranks were not summed."""
    return f"{role} missing a sum over {axis}"


def different_copies(axis: str) -> str:
    """The wording of a note on ranks that should have one value, but differ, and none is right."""
    return f"{axis} ranks hold different copies of what should be one value"


def unequal_copies(evidence: Evidence) -> Iterator[Note]:
    """Ranks that should have one value but differ; copies that add up are left to `missing_or_repeated_sum`."""
    for axis, values in _unsharded_axes(evidence):
        if axis not in evidence.at or _adds_up(evidence, values):
            continue
        wrong = [rank for rank, value in enumerate(values) if not _is_right(evidence, value)]
        if 0 < len(wrong) < len(values):
            ranks = f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
            text = f"wrong only on {axis} {ranks}"
            yield Note(f"{text}: the copies of the other ranks are right", ACROSS_SIZES, text)
        elif not _are_equal(evidence, values):
            yield Note(different_copies(axis), CONTEXT)


def misplaced_terms(evidence: Evidence) -> Iterator[Note]:
    """All shards are wrong, and their sum is right: their terms went to other ranks.

    The backward of a ring that sends the wrong way round does this. Rounding errors may add up too, and shards of one
    index do if a function keeps the sum along the dim, as the gradient of a softmax does; both are left out.
    """
    for sharded in evidence.layouts:
        count, lengths = len(sharded.positions), {len(each) for each in sharded.positions}
        if count < 2 or len(lengths) != 1 or min(lengths) < 2:
            continue
        got, want, budgets = (
            np.stack([whole.take(each, sharded.dim) for each in sharded.positions])
            for whole in (evidence.got, evidence.want, evidence.budgets)
        )
        is_far = np.abs(got - want) > 2 * count * budgets
        adds_up = (np.abs(got.sum(0) - want.sum(0)) <= budgets.sum(0)).all()
        if adds_up and all(each.any() for each in is_far) and (np.abs(want.sum(0)) > budgets.sum(0)).any():
            text = f"terms reach other ranks of {sharded.axis} than in the reference"
            what = f"over the ranks, {evidence.role}s add up as there"
            yield Note(f"{text}: {what}{evidence.caveat}", ACROSS_SIZES, text)


def zero_addend(evidence: Evidence) -> Iterator[Note]:
    """Exactly one rank of a sum contributed only zeros."""
    for axis, values in _unsharded_axes(evidence):
        zero_ranks = [rank for rank, value in enumerate(values) if not value.any()]
        if axis not in evidence.at and len(zero_ranks) == 1:
            text = f"{axis} rank {zero_ranks[0]} {ZERO_ADDEND}"
            yield Note(text, ACROSS_SIZES, text)


def _unsharded_axes(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    """Axes of several ranks that do not shard the tensor, each with its ranks' results."""
    return ((axis, values) for axis, values in evidence.by_rank.items() if len(values) > 1)


def _is_right(evidence: Evidence, value: np.ndarray) -> bool:
    return not evidence.differs(evidence.want, got=value).any()


def _adds_up(evidence: Evidence, values: np.ndarray) -> bool:
    with np.errstate(invalid="ignore", over="ignore"):
        total = values.sum(axis=0)
    # n terms, each within its budget, add up to n budgets.
    return not evidence.differs(evidence.want, len(values), got=total).any()


def _are_equal(evidence: Evidence, values: np.ndarray) -> bool:
    return not any(evidence.differs(values[0], got=value).any() for value in values[1:])


def missing_gradient(evidence: Evidence) -> Iterator[Note]:
    """All ranks, or some ranks of an axis, returned None, even if zeros would be within the budget."""
    is_none = evidence.gradient_is_none
    if is_none is None or not evidence.misses_gradient.any():
        return
    if is_none.all():
        yield Note(f"{NO_GRADIENT}: backward does not reach this input")
    else:
        text = f"{NO_GRADIENT}{_ranks_with_none(evidence, is_none)}"
        yield Note(f"{text}: backward does not reach this input there")
    if not evidence.is_wrong.any():
        hint = "the reference's gradient is not zero, although below its budget"
        yield Note(f"{hint}: return zeros, or let backward reach it")


def _ranks_with_none(evidence: Evidence, is_none: np.ndarray) -> str:
    """` by tp rank 1`: the ranks of an axis that hold exactly the elements without a gradient.

    Empty if there is no such axis.
    """
    for axis, owner in evidence.owners.items():
        ranks = np.unique(owner[is_none])
        if is_none[np.isin(owner, ranks)].all():
            return f" by {axis} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return ""
