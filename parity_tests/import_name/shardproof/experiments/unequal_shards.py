"""Shards of unequal length: whether a function is right where all ranks have as many rows, and wrong where they do not.

A mean of the ranks' means, a count of one rank's rows and an offset of rank times length are right for equal shards. In
the numbers of one case such a mistake has no pattern. So cases of one shape run with equal shards, with unequal ones,
and with an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw import size_choices
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.endings.raised import none_if_raised
from shardproof.experiments import cases
from shardproof.experiments.unused_inputs import says_a_place
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import OBSERVED, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.explain.sums import different_copies
from shardproof.report.report import Report

ROWS = 3  # of each of the equal shards
EQUAL, UNEQUAL, EMPTY = 0, 1, ROWS  # rows that the first shard has from the second
SEEDS = (1, 2)
TAKEN_FOR_EQUAL = "a count, a mean of the ranks' means or an offset takes the shards for equal"
Notes = Mapping[str, tuple[Note, ...]]


def name_unequal_shards(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes, with one on the shards for each tensor of which the others say at most a place.

    Cost: up to three runs for each seed.
    """
    by_label = dict(notes)
    uneven = [key for key, record in report.case.layouts.items() if len(set(record.get("lengths", ()))) > 1]
    little = (NO_PATTERN, FORWARD_EQUAL, *map(different_copies, report.case.mesh))
    unnamed = {label for label, each in notes.items() if all(says_a_place(n) or n.startswith(little) for n in each)}
    if not uneven or not unnamed:
        return by_label
    dims, axes = (" and ".join(dict.fromkeys(names)) for names in zip(*(key.split("/") for key in uneven), strict=True))
    words = {
        UNEQUAL: f"wrong only where ranks of {axes} have unequally many of {dims}: {TAKEN_FOR_EQUAL}",
        EMPTY: f"wrong only where a rank of {axes} has none of {dims}",
    }
    unnamed -= set().union(*_wrong(scheme, report.case, uneven, EQUAL) or [unnamed])
    for moved, text in words.items() if unnamed else ():
        wrong = _wrong(scheme, report.case, uneven, moved)
        for label in unnamed.intersection(*wrong) if wrong else ():
            rest = (note for note in by_label[label] if not says_a_place(note))
            by_label[label] = (Note(text, OBSERVED), *rest)
        unnamed -= set().union(*wrong)
    return by_label


def _wrong(scheme: Declared, case: CaseSpec, uneven: Sequence[str], moved: int) -> list[set[str]]:
    """The wrong tensors of a case for each seed with so many rows moved; empty if one of the cases cannot run."""
    derived = [_with_shards(scheme, case, uneven, moved, seed) for seed in SEEDS]
    ran = [report for report in cases.reports(scheme, derived) if report.failure is None]
    return [{t.label for t in report.tensors if not t.ok} for report in ran] if len(ran) == len(SEEDS) else []


@none_if_raised  # no declared size or layout allows these rows
def _with_shards(scheme: Declared, case: CaseSpec, uneven: Sequence[str], moved: int, seed: int) -> CaseSpec | None:
    """Normal values at larger sizes, with shards that are equal but for the rows moved from the second to the first."""
    larger = cases.larger(scheme, case, seed, values=False)
    if larger is None:
        return None
    sizes = {dim: larger.dims[dim] for dim in size_choices.free_dims(scheme)}
    lengths = {key: [ROWS] * case.mesh[key.split("/")[1]] for key in uneven}
    sizes |= {key.split("/")[0]: sum(each) for key, each in lengths.items()}
    fixed = {**case.scheme_mesh, **sizes, **case.options}
    drawn = draw_case(scheme, seeded_chooser(seed), fixed, dtype=case.dtype, engine=case.engine, seed=seed)
    for each in lengths.values():
        each[0] += moved
        each[1] -= moved
    return drawn.replace(
        mesh=case.mesh,
        layouts={**drawn.layouts, **{key: {**drawn.layouts[key], "lengths": each} for key, each in lengths.items()}},
        values=cases.normal_values(scheme, drawn),
        conditions=case.conditions,
    )
