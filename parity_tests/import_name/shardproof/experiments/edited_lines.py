"""Name the line whose small edit makes every tensor right, with what it should read.

The mistake may be in the order of two names, a border, a sign or a part that is left out, which the numbers do not
tell. So the failing case runs again with one edit of one line at a time (see line_edits.py), in forked processes and
for a limited time. An edit is named only if it makes every tensor right in all failing cases, on another mesh and in
drawn cases. If edits of several lines do, the nearest to the code as it is written is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.choosers import even_chooser
from shardproof.draw.drawing import draw_case
from shardproof.endings.raised import none_if_raised
from shardproof.experiments import cases
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.line_edits import LineEdit, edits_of
from shardproof.experiments.right_apart import JudgedCase, can_fork, which_are_right
from shardproof.experiments.running_lines import running_functions
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import ACROSS_MESHES, OBSERVED, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.report.report import Report

SEARCH_S = 6.0  # of computing in each process, for edits of the failing case
PROOF_S = 4.0  # likewise for the edits that mend it, in other cases
DRAWN = 6  # cases of any mesh and options, in which an edit must be right as well
Notes = Mapping[str, tuple[Note, ...]]


def name_edited_line(
    scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes
) -> dict[str, tuple[Note, ...]]:
    """The notes, with the line and its edit before those on numbers and places, if no note names a line or a cause."""
    by_label = dict(notes)
    if SPARE in report.case.mesh or not can_fork() or any(map(_names_a_cause, _first(notes))):
        return by_label
    edit = _edit(scheme, report, failing)
    if edit is None:
        return by_label
    for label, of_tensor in notes.items():
        rest = [note for note in of_tensor if not note.startswith(NO_PATTERN)]
        by_label[label] = (Note(f"{RIGHT_ONCE}{edit.words}", OBSERVED), *rest)
    return by_label


def _first(notes: Notes) -> Iterable[Note]:
    return (of_tensor[0] for of_tensor in notes.values() if of_tensor)


def _names_a_cause(note: Note) -> bool:
    """Whether a note names a line, or a number with a meaning on every mesh."""
    return note.scope == ACROSS_MESHES or note.startswith((RIGHT_ONCE, f"{FORWARD_EQUAL}: "))


def _edit(scheme: Declared, report: Report, failing: Sequence[Report]) -> LineEdit | None:
    smallest = min([report, *failing], key=lambda other: (sum(t.want.size for t in other.tensors), other.case.world))
    edits = _in_order(scheme, report, smallest)
    judged = _judged(scheme, [smallest.case])
    found = which_are_right(scheme, edits, judged, SEARCH_S) if judged else []
    if not found:
        return None
    others = [other.case for other in (report, *failing) if other is not smallest]
    others += [case for case in (cases.on_another_mesh(scheme, report.case, 4),) if case is not None]
    others += [case for number in range(DRAWN) if (case := _drawn(scheme, report.case, number)) is not None]
    judged = _judged(scheme, others)
    mending = [edits[number] for number in found]
    proven = which_are_right(scheme, mending, judged, PROOF_S)
    return min((mending[number] for number in proven), key=lambda edit: edit.rank, default=None)


def _in_order(scheme: Declared, report: Report, smallest: Report) -> list[LineEdit]:
    """The edits, likely ones first, of the backward first if only gradients are wrong; else in no order."""
    functions = running_functions(scheme, smallest.case)
    edits = edits_of(functions, list(report.case.mesh))
    Random(0).shuffle(edits)
    only_gradients = all(tensor.ok for tensor in report.tensors if tensor.role == "output")
    of_backward = {code for code, running in functions.items() if running.in_backward}
    return sorted(edits, key=lambda edit: (edit.rank, (edit.unit.code in of_backward) != only_gradients))


@none_if_raised
def _drawn(scheme: Declared, case: CaseSpec, number: int) -> CaseSpec:
    return draw_case(scheme, even_chooser(number), {}, dtype=case.dtype, engine=case.engine)


def _judged(scheme: Declared, derived: Iterable[CaseSpec]) -> list[JudgedCase]:
    """The cases whose reference takes them."""
    judged = (none_if_raised(JudgedCase.of)(scheme, case) for case in derived)
    return [each for each in judged if each is not None]
