"""Find an embedding over the vocabulary without its mask: ids of other ranks then read this rank's own rows.

The numbers show no pattern, since each wrong row is added to a right one. So a failing case runs again with zeros in
all shards of the table but one. For ids of the other shards the reference is 0, but the wrong function is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.engines.program import Program
from shardproof.engines.stitch import owners
from shardproof.explain.note import OBSERVED, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.judge.compare import wrong_elements
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

OWN_SHARDS = "of their own shards"
Notes = Mapping[str, tuple[Note, ...]]


def name_foreign_ids(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, tuple]:
    """The notes, with a first note on each output whose foreign ids read own rows. Cost: a run for each shard."""
    by_label = dict(notes)
    wrong = [tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok]
    unnamed = [label for label in wrong if any(map(_says_nothing, by_label.get(label, ())[:1]))]
    pairs = list(_pairs(scheme)) if unnamed else []
    clearest = max([report, *failing], key=lambda other: sum(tensor.want.size for tensor in other.tensors))
    for table, axis, ids in pairs:
        if clearest.case.mesh[axis] == 1:
            continue
        shown = _labels_with_foreign_rows(scheme, clearest.case, table, axis)
        for label in shown.intersection(unnamed):
            text = f"for {ids} of another {axis} rank a row of its own {table.name} is added: no mask, or a wrong one"
            rest = (note for note in by_label[label] if not _says_nothing(note))
            by_label[label] = (Note(text, OBSERVED), *rest)
    return by_label


def _says_nothing(note: Note) -> bool:
    return note.startswith(NO_PATTERN) or OWN_SHARDS in note


def _pairs(scheme: Declared) -> Iterator[tuple[Argument, str, str]]:
    """Each table with a dim over one axis, that axis, and the ids below that dim."""
    for arg in scheme.inputs:
        draw = scheme.draws[arg.name]
        for table in scheme.inputs if draw.kind == "ids" else ():
            axes = table.spec.axes
            if not table.is_integer and draw.dim in table.spec.dim_names and len(axes) == 1:
                yield table, next(iter(axes)), arg.name


def _labels_with_foreign_rows(scheme: Declared, case: CaseSpec, table: Argument, axis: str) -> set[str]:
    """The outputs that are wrong only where the reference is 0, with each shard alone."""
    program = Program.of(scheme)
    full = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    owner = owners(table, case, scheme.layouts)[axis]
    shown: list[set[str]] = []
    for rank in range(case.mesh[axis]):
        one_shard = {**full, table.name: np.where(owner == rank, full[table.name], 0.0)}
        report = verify_case(scheme, case, arrays=one_shard)
        wrong = {t.label: t.want[wrong_elements(t)] for t in report.tensors if t.role == "output" and not t.ok}
        if report.failure is not None:
            return set()
        shown.append({label for label, want in wrong.items() if not want.any()})
        if any(want.any() for want in wrong.values()):
            return set()
    return set().union(*shown)
