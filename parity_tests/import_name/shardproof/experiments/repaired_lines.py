"""Name the line of the collective to blame: its repair makes a wrong tensor right.

A gradient may be wrong although every collective is right, and the first collective of the backward is not to blame for
being first. So the case, or a larger case with the same failure, runs again with one line repaired at a time (see
engines/lockstep/repair.py). A line is named if its repair makes the tensor right, here and on another mesh. If there is
no such line and a sum is missing, `unsummed_edges` searches for its place in the autograd graph. For a wrong output,
each reduction of the forward is run with SUM in place of AVG, or the reverse, in every failing case. An asynchronous
collective is named as read before its wait if a tensor has fewer unexpected NaN without its poison, even if the tensor
stays wrong for another reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.ledger import CallSite, LedgerRow
from shardproof.engines.lockstep.repair import (
    NO_POISON,
    OF_THE_BACKWARD,
    OMIT,
    SUM_GRADIENT,
    SWAP_SUM_AND_MEAN,
    SWAPPED,
    Repair,
    under,
)
from shardproof.experiments import cases
from shardproof.experiments.unsummed_edges import places_of_missing_sums
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import CONTEXT, IN_THIS_CASE, NOT_DIFFERENTIABLE, READ_TOO_EARLY, Note
from shardproof.explain.places import NO_PATTERN, NOT_FINITE
from shardproof.explain.sums import different_copies, missing_sum
from shardproof.judge.compare import TensorComparison
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

MAX_REPAIRS = 16  # runs per question
Notes = Mapping[str, tuple[Note, ...]]


def name_lines(
    scheme: Declared, report: Report, other_reports: Sequence[Report], notes: Notes
) -> dict[str, tuple[Note, ...]]:
    """The notes, with each line that mends a tensor once it is repaired, in this case or a larger one on its mesh."""
    by_label = dict(notes)
    gradients = [label for label in notes if any(note.startswith(FORWARD_EQUAL) for note in notes[label])]
    if gradients and report.case.world > 1 and not _fails_on_one_rank(scheme, report, gradients):
        clearest = _clearest_failure(report, other_reports, gradients)
        repairs = list(_repairs(clearest.ledger.rows))
        right_here = _successful_repairs(scheme, clearest, gradients, repairs)
        on_all_meshes = {label: _on_another_mesh(scheme, report.case, label, r) for label, r in right_here.items()}
        repair_of_label = {label: repair for label, repair in on_all_meshes.items() if repair is not None}
        words_of_label = _words_of_lines(scheme, report, clearest, gradients, repair_of_label, notes)
        if words_of_label.keys() >= set(gradients):  # a repair counts only if nothing stays wrong
            for label, (words, sites) in words_of_label.items():
                named = _extend(by_label[label], FORWARD_EQUAL, f": {words}", sites)
                by_label[label] = tuple(sorted(named, key=lambda note: IN_THIS_CASE in note))  # the line says more
    cuts = {CallSite(row.op, row.source, row.phase): row for row in report.ledger.rows if row.cuts_graph}
    for label in gradients if cuts else ():
        if FORWARD_EQUAL in by_label[label]:  # no line is named
            by_label[label] = _with_cut(by_label[label], cuts)
    outputs = [tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok]
    for label, note in _reduction_notes(scheme, report, other_reports, outputs).items():
        by_label[label] = (*(other for other in by_label[label] if not other.startswith(NO_PATTERN)), note)
    if any(note.startswith(NOT_FINITE) for notes_of_tensor in notes.values() for note in notes_of_tensor):
        for label, site in _read_too_early(scheme, report).items():
            by_label[label] = _extend(by_label[label], NOT_FINITE, f"; {READ_TOO_EARLY}: {site}", [site])
    return by_label


def name_missing_sums(
    scheme: Declared, report: Report, other_reports: Sequence[Report], notes: Notes
) -> dict[str, tuple[Note, ...]]:
    """The notes, with the lines that lack a sum, if all other notes on the gradients say only that copies differ.

    A shard of a gradient has no copies: a norm over all shards may lack its sum where it scales this one.
    """
    by_label = dict(notes)
    gradients = [label for label in notes if FORWARD_EQUAL in notes[label]]
    axes = [axis for axis, size in report.case.mesh.items() if size > 1]
    unequal = tuple(map(different_copies, axes))
    is_unknown = all(note in (FORWARD_EQUAL, *unequal) for label in gradients for note in notes[label])
    if not gradients or not axes or not is_unknown or _fails_on_one_rank(scheme, report, gradients):
        return by_label
    clearest = _clearest_failure(report, other_reports, gradients)
    for axis in axes:
        place_of_label = places_of_missing_sums(scheme, clearest, gradients, axis)
        if place_of_label.keys() >= set(gradients):
            for label, place in place_of_label.items():
                words = _words_of_sum(place, None, f"a sum over {axis}")
                by_label[label] = _extend(by_label[label], FORWARD_EQUAL, f": {words}")
            return by_label
    return by_label


def _words_of_lines(
    scheme: Declared,
    report: Report,
    clearest: Report,
    gradients: Sequence[str],
    repair_of_label: Mapping[str, Repair],
    notes: Notes,
) -> dict[str, tuple[str, Sequence[CallSite]]]:
    """For each gradient that a repair or a sum makes right, the words on the line and the site that it blames."""
    cuts = {(row.op, row.source, row.phase) for row in clearest.ledger.rows if row.cuts_graph}
    words: dict[str, tuple[str, Sequence[CallSite]]] = {}
    for label, repair in repair_of_label.items():
        share = next((axis for axis in report.case.mesh if _is_share(notes[label], axis)), None)
        is_cut = (repair.op, repair.source, repair.phase) in cuts
        words[label] = _words(repair, share, is_cut=is_cut), repair.sites
    for axis in report.case.mesh:
        unequal = [label for label in gradients if label not in words and _differs(notes[label], axis)]
        place_of_label = places_of_missing_sums(scheme, clearest, unequal, axis) if unequal else {}
        for label, place in place_of_label.items():
            share = axis if _is_share(notes[label], axis) else None
            words[label] = _words_of_sum(place, share, f"a sum over {axis}"), ()
    return words


def _with_cut(notes: Sequence[Note], cuts: Mapping[CallSite, LedgerRow]) -> tuple[Note, ...]:
    """The notes with the collective that has no derivative. It comes first, after notes that name a mesh axis.

    A plain all_reduce of a sum is named only if nothing else is: where its result has type I, identity is right.
    """
    of_sums = {site for site, row in cuts.items() if row.op in OF_THE_BACKWARD and row.reduce_op in SWAPPED}
    site = next((site for site in cuts if site not in of_sums), None)
    if site is None and len(notes) == 1:
        site = next(iter(cuts))
    if site is None:
        return tuple(notes)
    named = Note(f"{FORWARD_EQUAL}: {without_derivative(site)}", CONTEXT, sites=[site])
    others = [note for note in notes if note != FORWARD_EQUAL]
    strong = [note for note in others if any(claim.startswith("factor ") for claim in note.claims)]
    return (*strong, named, *(note for note in others if note not in strong))


IN_PLACE = ("all_reduce", "broadcast", "reduce")  # their result is the tensor that is handed in


def without_derivative(site: CallSite) -> str:
    """The words for a plain collective in the autograd graph."""
    backward = "its backward is the identity" if site.op in IN_PLACE else "no gradient passes it"
    return f"{site} {NOT_DIFFERENTIABLE}; {backward}"


def _differs(notes: Iterable[Note], axis: str) -> bool:
    """Whether ranks of an axis have different parts of a gradient that should be equal, as after a missing sum."""
    words = (f"{missing_sum('gradient', axis)}:", different_copies(axis))
    return _is_share(notes, axis) or any(note.startswith(words) for note in notes)


def _is_share(notes: Iterable[Note], axis: str) -> bool:
    """Whether a tensor is 1/n of the reference, for n ranks of an axis: equal parts without a sum, or their mean."""
    return any(note.startswith("off by the constant factor") and f"(= 1/{axis})" in note for note in notes)


def _words_of_sum(place: str, share: str | None, lacking: str) -> str:
    return f"{place} gives 1/{share} of the sum" if share else f"{place} lacks {lacking}"


def _extend(notes: Iterable[Note], start: str, words: str, sites: Sequence[CallSite] = ()) -> tuple[Note, ...]:
    return tuple(note.extended(words, sites) if note.startswith(start) else note for note in notes)


def _clearest_failure(report: Report, other_reports: Sequence[Report], labels: Sequence[str]) -> Report:
    """Of the failing cases with these tensors wrong and all outputs right, the one with most elements."""
    for other in other_reports:
        outputs_pass = all(tensor.ok for tensor in other.tensors if tensor.role == "output")
        if outputs_pass and other.case.mesh == report.case.mesh and all(label in other.notes for label in labels):
            return other
    return report


def _fails_on_one_rank(scheme: Declared, report: Report, labels: Sequence[str]) -> bool:
    """Whether a tensor is also wrong on one rank, where no collective can be to blame."""
    on_one_rank = next(cases.reports(scheme, [cases.on_one_rank(scheme, report.case)]), None)
    return on_one_rank is not None and on_one_rank.failure is None and any(x in on_one_rank.notes for x in labels)


def _successful_repairs(
    scheme: Declared, report: Report, labels: Sequence[str], repairs: Sequence[Repair], *, entirely: bool = False
) -> dict[str, Repair]:
    """For each tensor, a repair that makes it right and no other tensor wrong; if `entirely`, all tensors right."""
    wrong = {tensor.label for tensor in report.tensors if not tensor.ok}
    repair_of_label: dict[str, Repair] = {}
    for repair in repairs[:MAX_REPAIRS]:
        if all(label in repair_of_label for label in labels):
            break
        repaired = verify_case(scheme, report.case, wrap_program=under(repair))
        still_wrong = {tensor.label for tensor in repaired.tensors if not tensor.ok}
        if repaired.failure is None and still_wrong < wrong and not (entirely and still_wrong):
            for label in sorted(wrong - still_wrong):
                repair_of_label.setdefault(label, repair)
    return {label: repair for label, repair in repair_of_label.items() if label in labels}


def _reduction_notes(
    scheme: Declared, report: Report, other_reports: Sequence[Report], labels: Sequence[str]
) -> dict[str, Note]:
    """For each wrong output, a note on the reduction that makes it right as a mean, or as a sum, in every failing case.

    One case is not enough: on two ranks any factor of 2 looks like it. Failing cases are not enough either: the repair
    must also be right where the function already is, as on a mesh with two axes of equal size.
    """
    op_of_line = {
        (row.op, row.source): row.reduce_op
        for row in report.ledger.rows
        if row.phase == "fwd" and row.op in OF_THE_BACKWARD and row.reduce_op in SWAPPED and len(row.group) > 1
    }
    if not labels or not op_of_line or _fails_on_one_rank(scheme, report, labels):
        return {}
    repairs = [Repair(op, source, "fwd", SWAP_SUM_AND_MEAN) for op, source in op_of_line]
    failing = [report, *(other for other in other_reports if other.case.world > 1)]
    notes = {}
    for label in labels:
        in_question = repairs
        for other in (other for other in failing if label in other.notes):
            repair = _successful_repairs(scheme, other, [label], in_question, entirely=True).get(label)
            in_question = [] if repair is None else [repair]
        for repair in in_question[:1]:
            if not _is_right_elsewhere(scheme, report.case, label, repair):
                continue
            now = op_of_line[repair.op, repair.source]
            notes[label] = Note(
                f"right once {repair.site} takes {SWAPPED[now]}, not {now}", CONTEXT, sites=[repair.site]
            )
    return notes


def _is_right_elsewhere(scheme: Declared, case: CaseSpec, label: str, repair: Repair) -> bool:
    """Whether the repaired function is right with masks that keep half, and on another mesh."""
    derived = (cases.of_half_masks(scheme, case, 7), cases.on_another_mesh(scheme, case, 4))
    repaired = cases.reports(scheme, derived, under(repair))
    return all(
        report.failure is None and all(tensor.ok for tensor in report.tensors if tensor.label == label)
        for report in repaired
    )


def _on_another_mesh(scheme: Declared, case: CaseSpec, label: str, repair: Repair) -> Repair | None:
    """The repair if it is right on another mesh too, else with the same mistake in the other lines there, else None.

    Omitting a sum over too large a group is right on one mesh alone. A single collective of a line is not tried there,
    because its number differs.
    """
    if repair.seq is not None or _is_right_there(scheme, case, label, repair):
        return repair
    another = next(cases.reports(scheme, [cases.on_another_mesh(scheme, case, 4)]), None)
    more = () if another is None else tuple(_other_lines(another.ledger.rows, repair))
    of_all = replace(repair, other_lines=more)
    return of_all if more and _is_right_there(scheme, case, label, of_all) else None


def _is_right_there(scheme: Declared, case: CaseSpec, label: str, repair: Repair) -> bool:
    """Whether the repair makes the tensor right on another mesh, or there is none."""
    repaired = cases.reports(scheme, [cases.on_another_mesh(scheme, case, 4)], under(repair))
    return all(
        report.failure is None and all(tensor.ok for tensor in report.tensors if tensor.label == label)
        for report in repaired
    )


def _other_lines(rows: Sequence[LedgerRow], repair: Repair) -> list[str]:
    """The other lines that issue the repaired operation in its phase, over several ranks."""
    alike = [row for row in rows if (row.op, row.phase) == (repair.op, repair.phase) and len(row.group) > 1]
    return list(dict.fromkeys(row.source for row in alike if row.source not in (repair.source, "?")))


def _repairs(rows: Sequence[LedgerRow]) -> Iterator[Repair]:
    """Repairs for each line, the backward's first; then of all lines at once; then for single collectives of a line."""
    numbers: dict[tuple[str, str, str], dict[int, None]] = {}
    for row in rows:
        if len(row.group) > 1 and row.source != "?" and row.op not in ("send", "recv", "barrier"):
            numbers.setdefault((row.phase, row.op, row.source), {})[row.seq] = None
    lines = sorted(numbers, key=lambda line: line[0] != "bwd")
    of_lines = [
        Repair(op, source, phase, action)
        for phase, op, source in lines
        for action in (OF_THE_BACKWARD.get(op, ()) if phase == "bwd" else (SUM_GRADIENT,))
    ]
    yield from of_lines
    for repair in of_lines:
        others = _other_lines(rows, repair)
        if others and repair.source < min(others):
            yield replace(repair, other_lines=tuple(others))
    for repair in of_lines:
        seqs = list(numbers[repair.phase, repair.op, repair.source])
        yield from (replace(repair, seq=seq) for seq in (seqs if len(seqs) > 1 else ()))


def _words(repair: Repair, share: str | None, *, is_cut: bool) -> str:
    places = " and ".join(sorted(map(str, repair.sites)))
    if is_cut and repair.action == SUM_GRADIENT:
        return f"{without_derivative(repair.site)}, without a sum of the ranks' gradients"
    return {
        OMIT: f"{places} [bwd] {'is one' if len(repair.sites) == 1 else 'are'} too many",
        SWAP_SUM_AND_MEAN: f"{places} [bwd] sums in place of averaging, or averages in place of summing",
        SUM_GRADIENT: _words_of_sum(f"the backward of {places}", share, "a sum of the ranks' gradients"),
    }[repair.action]


def _read_too_early(scheme: Declared, report: Report) -> dict[str, CallSite]:
    """For each tensor, the asynchronous collective that gives it unexpected NaN by its poison."""
    lines = {(row.op, row.source, row.phase): None for row in report.ledger.rows if row.is_async or row.op == "recv"}
    site_of_label: dict[str, CallSite] = {}
    before = {tensor.label: _unexpected_nans(tensor) for tensor in report.tensors}
    for op, source, phase in list(lines)[:MAX_REPAIRS]:
        repaired = verify_case(scheme, report.case, wrap_program=under(Repair(op, source, phase, NO_POISON)))
        for tensor in repaired.tensors if repaired.failure is None else ():
            if _unexpected_nans(tensor) < before[tensor.label]:
                site_of_label.setdefault(tensor.label, CallSite(op, source, phase))
    return site_of_label


def _unexpected_nans(tensor: TensorComparison) -> int:
    """The number of NaN where the reference has none."""
    return int((np.isnan(tensor.stitched.copies) & ~np.isnan(tensor.want)).sum())
