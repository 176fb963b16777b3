"""Name the wrong use of an input: the results are the reference's with one input edited.

A bias that every rank adds before a norm, columns of a fused projection in another order, a scale by the size of a
shard: behind a root or a softmax such a mistake does not show as a factor or an order of the result. But the result is
exactly the reference's with the input counted twice, reordered or scaled. So the reference is evaluated with one small
edit of its inputs at a time. An edit is named only if all outputs are right with it in every failing case and in a case
on another mesh.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.endings.raised import none_if_raised
from shardproof.engines.engines import run
from shardproof.engines.program import Program, RankResult
from shardproof.experiments import cases
from shardproof.experiments.edited_programs import RIGHT_ONCE
from shardproof.experiments.input_edits import Change, InputEdit, edits_of_inputs
from shardproof.explain.arithmetic import WITHIN_ROUNDING, names_a_number
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import OBSERVED, READ_TOO_EARLY, Note
from shardproof.explain.places import NO_PATTERN, ORDER_OF
from shardproof.judge.compare import compared
from shardproof.judge.reference import Reference, evaluate
from shardproof.report.report import Report

SEARCH_S = 4.0  # of computing
MIN_FAILING = 2  # cases
REFERENCE_WITH = "is the reference's with"
Notes = Mapping[str, tuple[Note, ...]]


@dataclass(frozen=True)
class _Case:
    """A case with the ranks' results and the reference's inputs."""

    scheme: Declared
    case: CaseSpec
    results: Sequence[RankResult]
    _wrong: dict[Any, set[str] | None] = field(default_factory=dict)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        program = Program.of(self.scheme)
        return {arg.name: program.full_array(arg, self.case) for arg in self.scheme.inputs}

    def wrong(self, edit: InputEdit) -> set[str] | None:
        """The labels of the gradients that are wrong beside the reference of edited inputs.

        None if an output is wrong, or if the edit does not apply.
        """
        args = {arg.name: arg for arg in self.scheme.inputs}
        changes = {name: edit.change(args[name], self.case) for name in edit.names}
        whole = {name: change for name, change in changes.items() if change is not None}
        key = edit.exchanged, frozenset((name, change.key) for name, change in whole.items())
        if key not in self._wrong:  # edits with other words may be the same here
            self._wrong[key] = self._wrong_with(whole, edit.exchanged) if len(whole) == len(changes) else None
        return self._wrong[key]

    def _wrong_with(self, changes: Mapping[str, Change], exchanged: tuple[str, ...]) -> set[str] | None:
        reference = _edited_reference(self, changes, exchanged)
        if reference is None:
            return None
        wrong = set[str]()
        for tensor in compared(self.scheme, self.case, self.results, reference):
            if not tensor.ok and tensor.role == "output":
                return None
            wrong |= set() if tensor.ok else {tensor.label}
        return wrong


@none_if_raised
def _edited_reference(case: _Case, changes: Mapping[str, Change], exchanged: tuple[str, ...]) -> Reference:
    """The reference of edited inputs, with the gradients of the inputs as they are."""
    other = dict(zip(exchanged, reversed(exchanged), strict=True))
    edited = {name: change.of(case.arrays[name]) for name, change in changes.items()}
    edited |= {name: case.arrays[source] for name, source in other.items()}
    reference = evaluate(case.scheme, Program.of(case.scheme, {**case.arrays, **edited}), case.case)

    def back(gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = {name: gradients[other.get(name, name)] for name in gradients}
        return {name: changes[name].back(g) if name in changes else g for name, g in own.items()}

    return replace(reference, gradients=back(reference.gradients), gradient_spread=back(reference.gradient_spread))


def name_edited_inputs(
    scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes
) -> dict[str, tuple[Note, ...]]:
    """The notes; if none names a cause, with an edit of the inputs that makes the reference equal to the results.

    Cost: a run of each failing case, and at most SEARCH_S seconds of the reference.
    """
    by_label = dict(notes)
    wrong_outputs = [tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok]
    first = [notes[label][0] for label in wrong_outputs if notes.get(label)]
    if 1 + len(failing) < MIN_FAILING or not first or any(map(_names_a_cause, first)):
        return by_label
    found = list(_right_edits(scheme, report, failing))
    if not found:
        return by_label
    edit, wrong = found[0]
    names = " or ".join(dict.fromkeys(" and ".join(each.names) for each, _ in found if each.words == edit.words))
    subject = "every output" if wrong else "every tensor"
    text = f"{subject} {REFERENCE_WITH} {names}{' ' if names else ''}{edit.words}{edit.meaning}"
    for label, old_notes in notes.items():
        if label not in wrong:
            by_label[label] = (Note(text, OBSERVED), *(note for note in old_notes if not note.startswith(NO_PATTERN)))
    return by_label


def _names_a_cause(note: Note) -> bool:
    starts = (RIGHT_ONCE, f"{FORWARD_EQUAL}: ", WITHIN_ROUNDING, ORDER_OF)
    return names_a_number(note) or note.startswith(starts) or READ_TOO_EARLY in note


def _right_edits(scheme: Declared, report: Report, failing: Sequence[Report]) -> Iterator[tuple[InputEdit, set[str]]]:
    """The edits with which all outputs of all cases are right, each with the gradients that stay wrong."""
    start = time.process_time()
    largest = max([report, *failing], key=lambda other: (other.case.world > 1, sum(t.want.size for t in other.tensors)))
    derived = [largest.case, *(other.case for other in (report, *failing) if other is not largest)]
    derived += [case for case in (cases.on_another_mesh(scheme, report.case, 4),) if case is not None]
    ran = [each for case in derived if (each := none_if_raised(_run_case)(scheme, case)) is not None]
    if len(ran) < MIN_FAILING or ran[0].case is not largest.case:
        return
    is_found = False
    for _, edits in groupby(edits_of_inputs(scheme, largest.case), key=lambda edit: edit.group):
        for edit in edits if not is_found else ():
            if time.process_time() - start > SEARCH_S:
                return
            wrong = _wrong_gradients(ran, edit)
            if wrong is not None:
                is_found = True
                yield edit, wrong


def _wrong_gradients(ran: Sequence[_Case], edit: InputEdit) -> set[str] | None:
    wrong = set[str]()
    for case in ran:
        of_case = case.wrong(edit)
        if of_case is None:
            return None
        wrong |= of_case
    return wrong


def _run_case(scheme: Declared, case: CaseSpec) -> _Case:
    return _Case(scheme, case, run(Program.of(scheme), case, case.engine).results)
