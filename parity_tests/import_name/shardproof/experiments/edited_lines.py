"""Name the line that one small edit makes right for every tensor, and the edited line.

The mistake may be in the order of two names, a border, a sign or a part that is left out, which the numbers do not
tell. So the failing case runs again with one edit of one line at a time (see line_edits.py), in forked processes and
for a limited time. An edit is named only if it makes every tensor right in all failing cases, on another mesh and in
drawn cases, and if every line that ran in the failing case still runs in one of them: an edit may also lead around the
mistake, into another branch or past the rounds of a loop. Edits come in this order: they apply a factor or a mask that
is never read; they leave out or exchange a part; they add a part; they edit collectives or the call. Among equal edits,
lines that run in failing cases alone come first.
"""

from __future__ import annotations

import ast
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.draw.choosers import even_chooser
from shardproof.draw.drawing import draw_case
from shardproof.endings.raised import none_if_raised
from shardproof.engines.ledger import COLLECTIVES
from shardproof.experiments import cases
from shardproof.experiments.alternatives import ADDED, LIKELY, POSSIBLE, UNREAD
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.line_edits import LineEdit, edits_of
from shardproof.experiments.live_objects import caches
from shardproof.experiments.own_shards import is_of_own_shards
from shardproof.experiments.right_apart import JudgedCase, can_fork, judged_cases, which_are_right
from shardproof.experiments.running_lines import PARALLEL_TORCH, Functions, running_functions
from shardproof.explain.arithmetic import WITHIN_ROUNDING, names_a_number
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.evidence import SINGLE_ELEMENT
from shardproof.explain.note import ACROSS_MESHES, OBSERVED, READ_TOO_EARLY, Note
from shardproof.explain.places import NO_PATTERN, SAME_VALUES
from shardproof.places import SOURCES, TESTS
from shardproof.report.report import Report

AROUND = ADDED + 1  # rank of the edits of a caller and of collectives: they may undo the code between them
# Of computing in each process, for edits of a rank.
SEARCH_S = {UNREAD: 2.0, LIKELY: 5.0, POSSIBLE: 3.0, ADDED: 0.5, AROUND: 1.0}
PROOF_S = 3.0  # likewise for the edits that mend the failing case, in other cases
MIN_FAILING = 2  # other cases that fail: an edit that mends a single rare case may lead around the mistake
SUSPECTED = 6  # other cases for the comparison of lines
MOST_TRACED = 12  # cases that may run a line of the failing case
MOST_LINES = 2  # that a note names
DRAWN, MOST_DRAWN = 6, 40  # cases of any mesh and options; an edit must be right in them as well
DRAWN_FAILING = 4  # of them: if fewer cases fail, an edit of a right line could mend them all
MOST_ORDINARY = 12
ORDINARY = "; tested with ordinary values"
OR_CALLED = ": the mistake is in this line of the scheme, or in the code that it calls"
DRAWN_S = 4.0  # of computing for more than DRAWN of them
OURS = tuple(map(str, SOURCES))
Notes = Mapping[str, tuple[Note, ...]]


def name_edited_line(
    scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes
) -> dict[str, tuple[Note, ...]]:
    """The notes, with the line and its edit before those on numbers and places, if no note names a line or a cause."""
    by_label = dict(notes)
    if len(failing) < MIN_FAILING or not can_fork() or _have_causes(report, notes):
        return by_label
    edits, where = _edits(scheme, report, failing)
    if not edits:
        return by_label
    words = ", or once ".join(edit.words for edit in edits[:MOST_LINES]) + where
    named = Note(f"{RIGHT_ONCE}{words}", OBSERVED)
    for label, old_notes in notes.items():
        rest = [note for note in old_notes if not note.startswith(NO_PATTERN)]
        telling = [note for note in rest if where == OR_CALLED and _tells_more(note)]
        by_label[label] = (*telling, named, *(note for note in rest if note not in telling))
    return by_label


def _tells_more(note: Note) -> bool:
    """Whether a note tells more than that a line, or the code that it calls, is wrong: a number or own shards."""
    is_number = note.scope == ACROSS_MESHES and not note.endswith(SINGLE_ELEMENT)
    return is_of_own_shards(note) or is_number


def _have_causes(report: Report, notes: Notes) -> bool:
    """Whether the first note of each wrong output names a cause; if all outputs are right, of a gradient."""
    named = {label for label, of_tensor in notes.items() if of_tensor and _names_a_cause(of_tensor[0])}
    outputs = {tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok}
    return outputs <= named if outputs else bool(named)


def _names_a_cause(note: Note) -> bool:
    """Whether a note names a line, a number with a meaning on every mesh, or a rounding that a wider dtype confirms.

    That values are in another order is no cause: a line may tell which order. A number that is read too early is one:
    any other number in its place is right.
    """
    starts = (RIGHT_ONCE, f"{FORWARD_EQUAL}: ", WITHIN_ROUNDING)
    is_number = names_a_number(note) and not note.startswith(SAME_VALUES)
    return is_number or note.startswith(starts) or READ_TOO_EARLY in note


def _edits(scheme: Declared, report: Report, failing: Sequence[Report]) -> tuple[list[LineEdit], str]:
    """The edits of the lowest rank that are right in all cases, the smallest of each line, and the words after them."""
    smallest = min([report, *failing], key=lambda other: (sum(t.want.size for t in other.tensors), other.case.world))
    judged = judged_cases(scheme, [smallest.case])
    known = judged_cases(scheme, _other_cases(scheme, report, [*failing, report], smallest))
    drawn = drawn_cases(scheme, report.case)
    by_rank = _by_rank(scheme, report, smallest, [*known, *drawn])
    mending: list[LineEdit] = []
    for rank, edits in sorted(by_rank.items()) if judged and [*known, *drawn] else ():
        of_rank = _right(scheme, edits, judged, SEARCH_S[rank])
        proven = _reaching(_right(scheme, of_rank, [*known, *drawn], PROOF_S), scheme, [*judged, *known, *drawn])
        if proven:
            named = _smallest_of_lines(proven)
            is_around = rank == AROUND and proven[0].unit.file == scheme.file
            return named, OR_CALLED if is_around or _leads_around_torch(named, scheme, smallest.case) else ""
        mending += of_rank
    ordinary = _with_ordinary_values(scheme, drawn) if mending else []
    proven = _right(scheme, mending, [*known, *ordinary], PROOF_S) if ordinary else []
    proven = _reaching(proven, scheme, [*judged, *known, *ordinary])
    return _smallest_of_lines([edit for edit in proven if edit.rank == proven[0].rank]), ORDINARY


def _smallest_of_lines(edits: Sequence[LineEdit]) -> list[LineEdit]:
    """The smallest edit of each line, the earlier line first of two that are equal.

    A condition that would skip a line says less than an edit of that line.
    """
    telling = [edit for edit in edits if not any(map(edit.is_condition_of, edits))]
    by_size = sorted(telling, key=lambda edit: (edit.size, edit.line))
    return list({(edit.unit.file, edit.line): edit for edit in reversed(by_size)}.values())[::-1]


def _with_ordinary_values(scheme: Declared, drawn: Sequence[JudgedCase]) -> list[JudgedCase]:
    """The drawn cases with ordinary values; empty if they have no others, or if too few of them fail.

    With huge ones a product may overflow, and then even the right function is not equal to its reference.
    """
    derived = [each.case.replace(values=cases.normal_values(scheme, each.case)) for each in drawn[:MOST_ORDINARY]]
    if all(case.values == each.case.values for case, each in zip(derived, drawn, strict=False)):
        return []
    judged = judged_cases(scheme, derived)
    return judged if sum(not each.is_right(scheme) for each in judged) >= MIN_FAILING else []


def _right(scheme: Declared, edits: Sequence[LineEdit], judged: Sequence[JudgedCase], seconds: float) -> list[LineEdit]:
    return [edits[number] for number in which_are_right(scheme, edits, judged, seconds)] if edits else []


@dataclass(frozen=True)
class _Reaching:
    """An edit that applies if every line of the first case still runs, and again in a loop, in some case.

    A right function has no branch that is never taken and no loop with a single round: the mistake may stand there.
    """

    edit: LineEdit
    scheme: Declared
    judged: Sequence[JudgedCase]
    before: frozenset[tuple[str, int, bool]]

    @contextmanager
    def applied(self) -> Iterator[bool]:
        with self.edit.applied() as is_applied:
            yield is_applied and self._reaches()

    def _reaches(self) -> bool:
        kept = caches()
        left = {each for each in self.before if each[0] != self.edit.unit.file or each[1] not in self.edit.own_lines}
        for each in self.judged:
            left -= _reached(running_functions(self.scheme, each.case, kept))
            if not left:
                return True
        return False


def _reaching(edits: Sequence[LineEdit], scheme: Declared, judged: Sequence[JudgedCase]) -> list[LineEdit]:
    """The edits that lead around no line of the first case: those with every line in it, else in MOST_TRACED cases.

    Lines of our functions do not count where a user's scheme calls them: one branch is for 16 bits alone.
    """
    if not edits:
        return []
    reached = _reached(running_functions(scheme, judged[0].case, caches()))
    trusted = set() if _is_ours(scheme) else _of_ours({file for file, _, _ in reached})
    before = frozenset(each for each in reached if each[0] not in trusted)
    for some in (judged[:1], judged[:MOST_TRACED]):
        reaching = [_Reaching(edit, scheme, some, before) for edit in edits]
        found = which_are_right(scheme, reaching, (), PROOF_S)
        if found:
            return [edits[number] for number in found]
    return []


def _leads_around_torch(edits: Sequence[LineEdit], scheme: Declared, case: CaseSpec) -> bool:
    """Whether one of these edits of the scheme's file leads around a line of torch's parallel code, as a flag may.

    Then that line may be the wrong one. The edits are right in all cases, so that they need no process of their own.
    """
    if any(edit.unit.file != scheme.file for edit in edits[:MOST_LINES]):
        return False
    _of_parallel_torch(scheme, case)  # which skips lines in the next run, because torch has caches
    before = _of_parallel_torch(scheme, case)
    for edit in edits[:MOST_LINES]:
        with edit.applied():
            if before - _of_parallel_torch(scheme, case):
                return True
    return False


def _of_parallel_torch(scheme: Declared, case: CaseSpec) -> set[tuple[str, int]]:
    lines = _lines(running_functions(scheme, case, caches(), in_torch=True))
    return {line for line in lines if line[0].startswith(PARALLEL_TORCH)}


def _other_cases(
    scheme: Declared, report: Report, failing: Sequence[Report], smallest: Report
) -> Iterator[CaseSpec | None]:
    """The further cases that an edit must make right."""
    yield from (other.case for other in failing if other is not smallest)
    yield cases.on_another_mesh(scheme, report.case, 4)


def _by_rank(
    scheme: Declared, report: Report, smallest: Report, others: Sequence[JudgedCase]
) -> dict[int, list[LineEdit]]:
    """The edits by rank, suspicious lines first, and lines of the backward before them if only gradients are wrong."""
    kept = caches()
    functions = running_functions(scheme, smallest.case, kept)
    dims = [dim for arg in (*scheme.inputs, *scheme.outputs) for dim in arg.spec.dims if dim.shardings]
    edits = edits_of(functions, list(report.case.mesh), list(dict.fromkeys(dim.name for dim in dims if dim.name)))
    Random(0).shuffle(edits)
    only_gradients = all(tensor.ok for tensor in report.tensors if tensor.role == "output")
    of_backward = {code for code, running in functions.items() if running.in_backward}
    suspicion = _suspicion(scheme, functions, others, kept)
    files = {code.co_filename for code in functions}
    around, trusted = _files_around(scheme, files), set() if _is_ours(scheme) else _of_ours(files)
    by_rank: dict[int, list[LineEdit]] = {}
    for edit in sorted(
        edits,
        key=lambda edit: (
            (edit.unit.code in of_backward) != only_gradients,
            -suspicion[edit.unit.file, edit.line],
            not isinstance(edit.old, ast.stmt),  # few for each line, and the time may not be enough for all
        ),
    ):
        if edit.unit.file not in trusted:
            by_rank.setdefault(AROUND if edit.unit.file in around else edit.rank, []).append(edit)
    return by_rank


def _files_around(scheme: Declared, files: set[str]) -> set[str]:
    """Of the files that run, those around the code to verify: our collectives, and the scheme's if it calls others."""
    functions = {file for file in files if file.startswith(COLLECTIVES)} if _is_ours(scheme) else _of_ours(files)
    if scheme.file.startswith(str(TESTS / "collectives")):
        functions.clear()
    return functions | (set() if files <= {*functions, scheme.file} else {scheme.file})


def _is_ours(scheme: Declared) -> bool:
    return Path(scheme.file).is_relative_to(TESTS)


def _of_ours(files: set[str]) -> set[str]:
    """The files of our functions: a user's scheme calls them and does not change them."""
    return {file for file in files if file.startswith(OURS)}


def _suspicion(
    scheme: Declared, functions: Functions, others: Sequence[JudgedCase], kept: Sequence[Any]
) -> dict[tuple[str, int], float]:
    """For each line, from 0 to 1, how far it runs in failing cases alone."""
    ran: dict[tuple[str, int], list[bool]] = {line: [True] for line in _lines(functions)}
    failing = 1
    for other in others[:SUSPECTED]:
        fails = not other.is_right(scheme)
        failing += fails
        for line in _lines(running_functions(scheme, other.case, kept)) & ran.keys():
            ran[line].append(fails)
    return defaultdict(float, {line: sum(fails) / math.sqrt(failing * len(fails)) for line, fails in ran.items()})


def _lines(functions: Functions) -> set[tuple[str, int]]:
    return {(code.co_filename, line) for code, running in functions.items() for line in running.lines}


def _reached(functions: Functions) -> set[tuple[str, int, bool]]:
    """The lines that run, and those that a call runs again, with True."""
    again = {(code.co_filename, line, True) for code, running in functions.items() for line in running.repeated}
    return again | {(*line, False) for line in _lines(functions)}


def drawn_cases(scheme: Declared, case: CaseSpec) -> list[JudgedCase]:
    """Drawn cases: more than DRAWN, until DRAWN_FAILING of them fail or the time is over."""
    start, drawn, failing = time.process_time(), list[JudgedCase](), 0
    for number in range(MOST_DRAWN):
        if number >= DRAWN and (failing >= DRAWN_FAILING or time.process_time() - start > DRAWN_S):
            break
        judged = judged_cases(scheme, [_drawn_case(scheme, case, number)])
        failing += sum(not each.is_right(scheme) for each in judged)
        drawn += judged
    return drawn


@none_if_raised
def _drawn_case(scheme: Declared, case: CaseSpec, number: int) -> CaseSpec:
    return draw_case(scheme, even_chooser(number), {}, dtype=case.dtype, engine=case.engine)
