"""Test notes on other cases: a note that another case refutes is not printed.

`shardproof.verification` lists all steps from a mismatch to its printed notes; these are the sixth and seventh.

A note from one case is tested on other cases: larger ones with the same kinds of values and with normal ones, another
mesh, a wider dtype, slightly changed inputs. A claim must hold in every case that fails on the same tensor, and be of a
kind that the experiment can refute. A note that no other case could test says so; a refuted note is dropped. Notes that
state a fact about their own case are printed unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import OTHER_CALLS, VIEWS
from shardproof.declare.declared import Declared
from shardproof.engines.program import Program
from shardproof.experiments import cases
from shardproof.experiments.counted_inputs import name_counted_inputs
from shardproof.experiments.detached_transfers import name_detached_transfers
from shardproof.experiments.edited_inputs import name_edited_inputs
from shardproof.experiments.edited_lines import OR_CALLED, name_edited_line
from shardproof.experiments.edited_programs import RIGHT_ONCE, name_edits, name_edits_of_two
from shardproof.experiments.first_overflow import name_first_overflow
from shardproof.experiments.foreign_ids import name_foreign_ids
from shardproof.experiments.narrow_kernels import name_narrow_kernels
from shardproof.experiments.narrow_tensors import narrow_dtypes
from shardproof.experiments.overflowing_gradients import name_overflowing_gradients
from shardproof.experiments.own_shards import name_own_shards
from shardproof.experiments.repaired_lines import name_lines, name_missing_sums
from shardproof.experiments.rounding_errors import MIN_ELEMENTS, vanishes
from shardproof.experiments.unequal_shards import name_unequal_shards
from shardproof.experiments.unused_inputs import name_unused_inputs
from shardproof.experiments.wrong_backwards import name_wrong_backwards
from shardproof.experiments.zeros_of_values import name_zeros_of_values
from shardproof.explain.arithmetic import CANCELS, SMALL_ERROR, names_a_number
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.collect_evidence import borders
from shardproof.explain.evidence import SINGLE_ELEMENT, Evidence
from shardproof.explain.note import (
    ACROSS_MESHES,
    ACROSS_SIZES,
    CONTEXT,
    HYPOTHESES,
    IN_THIS_CASE,
    OBSERVED,
    ROUNDING,
    Note,
)
from shardproof.explain.places import ALL_THERE, NO_PATTERN, ORDER_OF, SAME_VALUES, worst_element
from shardproof.explain.sums import ZERO_ADDEND, different_copies, zero_addend
from shardproof.judge.compare import COARSER, max_finite
from shardproof.report.report import Report, mesh_text, sizes
from shardproof.verify_one_case import NARROW

UNTESTED = "; from one case"
NOT_SO_ON = "; not so on "  # another mesh
STATE = "state that depends on its sizes or values is kept between calls"
OF_OTHER_CALL = f"the other call: {STATE}"
RIGHT_WITHOUT_CALL = f"right without {OF_OTHER_CALL}"
MORE = 8  # larger cases to try if none of the first ones fails
PASSING_TRIED = 4  # passing cases that a note is compared with


def from_one_case(report: Report) -> Report:
    """The report with its hypotheses marked as from one case.

    Hypotheses that already say that they rest on one element are not marked.
    """
    notes = {label: tuple(_untested(note) for note in notes) for label, notes in report.notes.items()}
    return replace(report, notes=notes)


def check_notes(scheme: Declared, report: Report) -> Report:
    """The report of a failing case with the notes that no other case refutes.

    Cost: up to 6 further cases, 14 if larger ones pass; up to 8 for each note on rounding and 4 for a note on an addend
    of zeros; up to 11 + 3 * MAX_REPAIRS for lines of collectives; up to MAX_EDITS for edits, and 8 for each that mends
    the case; for edits of lines and of inputs the seconds of `edited_lines` and `edited_inputs`; up to MOST_CASES for
    each input and for each collective; 3 + MAX_FUNCTIONS for hand-written backwards; up to 6 for unequal shards; up to
    1 + MOST_READS for an input that is counted on every rank; 1 for zeros; up to 2 + 2 * MOST_OPERATIONS for NaN and
    infinity.
    """
    # The function's own warnings were shown before; an edit may warn of operations that the function does not have.
    with warnings.catch_warnings(action="ignore"):
        return _after_experiments(scheme, report)


def _after_experiments(scheme: Declared, report: Report) -> Report:
    """The report after all experiments, in their order."""
    if report.failure is not None or not report.notes:
        return report
    # Skip other cases if each would start processes, or would start from state that earlier calls left in the function.
    if report.case.engine != "lockstep" or report.state_between_calls is not None:
        notes = _of_the_call(report, report.notes)
        if report.state_between_calls is not None:  # numbers from another call may fit any claim by chance
            notes = {label: [note for note in each if note.scope not in HYPOTHESES] for label, each in notes.items()}
        return from_one_case(replace(report, notes=notes))
    # 1. The derived cases that also fail.
    failing = _failing_cases(scheme, report.case)
    # 2. For each tensor, the notes that none of them refutes.
    notes = {label: tuple(_survivors(scheme, report, label, failing)) for label in report.notes}
    notes = _of_the_call(report, notes)
    # 3. Lines and shards: a collective that makes the tensor right once it is repaired, the operation that makes the
    # first NaN, ranks that compute the reference of their own shards.
    notes = name_lines(scheme, report, failing, notes)
    notes = name_overflowing_gradients(scheme, report, name_first_overflow(scheme, report, notes))
    notes = name_own_shards(scheme, report, failing, notes)
    # 4. One collective more or less that makes every tensor right.
    notes = name_edits(scheme, report, failing, notes)
    # 5. If that names nothing: an edit of one line, of two operations at once, of an input of the reference. Then the
    # inputs that no output depends on, the collectives that lose a gradient, the lines that lack a sum, a wrong
    # backward, and the shards that show the mistake.
    notes = name_edited_line(scheme, report, failing, notes)
    notes = name_edits_of_two(scheme, report, failing, notes)
    notes = name_edited_inputs(scheme, report, failing, notes)
    notes = name_foreign_ids(scheme, report, failing, notes)
    notes = name_detached_transfers(scheme, report, name_unused_inputs(scheme, report, failing, notes))
    notes = name_missing_sums(scheme, report, failing, notes)
    notes = name_wrong_backwards(scheme, report, notes)
    notes = name_unequal_shards(scheme, report, notes)
    notes = {label: _without_beginnings(_without_guesses(each)) for label, each in notes.items()}
    notes = name_counted_inputs(scheme, report, failing, notes)
    notes = name_zeros_of_values(scheme, report, notes)
    notes = name_narrow_kernels(scheme, report, notes)
    notes = _referring_to_gradients(report, notes)
    return replace(report, notes=notes, clearer_report=_clearer_report(report, notes, failing))


def _referring_to_gradients(report: Report, notes: Mapping[str, Sequence[Note]]) -> dict[str, tuple[Note, ...]]:
    """The notes; an output of one number, which shows no pattern, refers to a gradient's note."""
    by_label = {label: tuple(each) for label, each in notes.items()}
    gradients = [tensor.label for tensor in report.tensors if tensor.role == "gradient" and by_label.get(tensor.label)]
    said = [(label, by_label[label][0]) for label in gradients]
    label, note = next((each for each in said if each[1].scope in (ACROSS_SIZES, ACROSS_MESHES)), ("", None))
    for tensor in report.tensors:
        first = next(iter(by_label.get(tensor.label, ())), "")
        if note is not None and tensor.role == "output" and tensor.want.size == 1 and first.startswith(NO_PATTERN):
            by_label[tensor.label] = (Note(f"see {label}: {note}", sites=note.sites),)
    return by_label


def _without_guesses(notes: Sequence[Note]) -> tuple[Note, ...]:
    """The notes on one tensor, without those that a line explains: on rounding, on a number without a meaning."""
    is_repaired = any(note.startswith(f"{FORWARD_EQUAL}: ") for note in notes)
    is_edited = any(note.startswith(RIGHT_ONCE) and OR_CALLED not in note for note in notes)
    rounding = [note for note in notes if is_repaired and note.scope == ROUNDING]
    numbers = [note for note in notes if is_edited and note.scope == ACROSS_MESHES and not names_a_number(note)]
    return tuple(note for note in notes if note not in (*rounding, *numbers))


def _without_beginnings(notes: Sequence[Note]) -> tuple[Note, ...]:
    """The notes without any note that is the beginning of another note."""
    return tuple(note for note in notes if not any(other.startswith(f"{note}; ") for other in notes))


def _clearer_report(report: Report, notes: Mapping[str, Sequence[Note]], failing: Sequence[Report]) -> Report | None:
    """The case that a note names; else, if this case has too few elements, a larger one on its mesh.

    Of several larger cases with the same wrong tensors, the smallest with at least MIN_ELEMENTS elements in each.
    """
    all_notes = [note for each in notes.values() for note in each]
    named = [other for other in failing if any(f"(at {sizes(other.case)})" in note for note in all_notes)]
    alike = [other for other in failing if other.case.mesh == report.case.mesh and other.notes.keys() == notes.keys()]
    large = [
        other for other in alike if all(tensor.want.size >= MIN_ELEMENTS for tensor in other.tensors if not tensor.ok)
    ]
    is_clear = all(tensor.want.size >= MIN_ELEMENTS for tensor in report.tensors if not tensor.ok)
    return next(iter([*named, *([] if is_clear else [*reversed(large), *alike])]), None)


def _failing_cases(scheme: Declared, case: CaseSpec) -> list[Report]:
    """Reports of derived cases with wrong tensors, the case with most elements first."""
    derived = (
        cases.larger(scheme, case, 1, values=True),
        cases.larger(scheme, case, 2, values=False),
        cases.larger(scheme, case, 3, values=False, other_sizes=True),
        cases.on_another_mesh(scheme, case, 4),
        cases.of_one_id(scheme, case, 5, shard=0),
        cases.of_one_id(scheme, case, 6, shard=1),
    )
    failing = [report for report in cases.reports(scheme, derived) if report.failure is None and report.notes]
    if not any(report.case.mesh == case.mesh for report in failing):  # as when few of the drawn lengths are uneven
        more = (cases.larger(scheme, case, 6 + place, values=False, place=place) for place in range(1, 1 + MORE))
        shown = (report for report in cases.reports(scheme, more) if report.failure is None and report.notes)
        failing += islice(shown, 2)
    return sorted(failing, key=_elements, reverse=True)


def _elements(report: Report) -> int:
    return sum(tensor.want.size for tensor in report.tensors)


def _survivors(scheme: Declared, report: Report, label: str, failing: Sequence[Report]) -> Iterator[Note]:
    """Notes on one tensor: facts about its own case, hypotheses from all failing cases, context of its own case.

    Hypotheses from its own case come first. A hypothesis is dropped if it repeats an earlier claim, or if another mesh
    refutes it and others remain.
    """
    same_tensor = [other for other in failing if label in other.notes]
    survivors: list[Note] = []
    for origin in (report, *same_tensor):
        is_of_this_mesh = origin.case.mesh == report.case.mesh
        for note in origin.notes[label]:
            if note.scope == ACROSS_SIZES and not is_of_this_mesh:
                continue
            is_repeated = any(claim in earlier.claims for earlier in survivors for claim in note.claims)
            if note.scope in HYPOTHESES and not is_repeated:
                survivor = _tested_hypothesis(scheme, report, origin, label, note, same_tensor)
                survivors += [] if survivor is None else [survivor]
    survivors = [note for note in survivors if NOT_SO_ON not in note] or survivors
    if not any(note.scope == ACROSS_MESHES for note in survivors):
        survivors += _of_this_case_alone(scheme, report, label, same_tensor, survivors)
    observed = [n for n in report.notes[label] if n.scope == OBSERVED and not n.startswith(NO_PATTERN)]
    context = [note for note in report.notes[label] if note.scope == CONTEXT]
    told = [*observed, *survivors, *context] or _different_copies(report, label, same_tensor)
    yield from told or [worst_element(_evidence(scheme, report, label))]


def _different_copies(report: Report, label: str, same_tensor: Sequence[Report]) -> list[Note]:
    """What another case on this mesh says of unequal copies. In this case they add up, which the other one refutes."""
    wordings = {different_copies(axis) for axis in report.case.mesh}
    on_this_mesh = [other for other in same_tensor if other.case.mesh == report.case.mesh]
    return list(dict.fromkeys(note for other in on_this_mesh for note in other.notes[label] if note in wordings))


def _of_this_case_alone(
    scheme: Declared, report: Report, label: str, same_tensor: Sequence[Report], survivors: Sequence[Note]
) -> Iterator[Note]:
    """A note on a number that fits this case and not another one, which it names.

    It also says whether the other case has a number for each rank or index, such as the share of a local count, unless
    a survivor says that.
    """
    for note in report.notes[label]:
        is_number = note.scope == ACROSS_MESHES and note.startswith("off by the")
        if is_number and not note.endswith(SINGLE_ELEMENT):
            refuted = (other for other in same_tensor if _applies(scheme, note, other, label))
            other = next((other for other in refuted if not _is_shown(scheme, note, other, label)), None)
            if other is not None:
                weaker = next((n for n in other.notes[label] if n.startswith("off by ")), "not")
                if weaker == "not" and "(= " not in note:  # any number may fit few elements
                    continue
                number, of_other = note.partition(":")[0], weaker.partition(":")[0]
                is_said = any(survivor.startswith(f"{of_other}: ") for survivor in survivors)
                yield Note(f"{number} {IN_THIS_CASE}" + ("" if is_said else f"; {of_other} at {sizes(other.case)}"))
                return


def _evidence(scheme: Declared, report: Report, label: str) -> Evidence:
    """The part of a tensor's evidence that its report and scheme contain."""
    tensor = next(tensor for tensor in report.tensors if tensor.label == label)
    return Evidence(
        tensor.name,
        tensor.role,
        tensor.got,
        tensor.want,
        tensor.element_budgets,
        owners=tensor.owners,
        borders=borders(scheme, Program.of(scheme), report.case, tensor),
        max_finite=max_finite(tensor.dtype),
    )


def _tested_hypothesis(
    scheme: Declared, report: Report, origin: Report, label: str, note: Note, same_tensor: Sequence[Report]
) -> Note | None:
    """The printed form of a hypothesis from `origin`, which is `report` or another failing case; None if refuted.

    A hypothesis on rounding or on an addend of zeros needs further cases; it is dropped if it comes from another case.
    """
    is_of_this_case = origin is report
    # With few elements the printed case may have another note; but it must show this pattern too.
    must_fit = not is_of_this_case and note.fits is not None and _applies(scheme, note, report, label)
    if must_fit and not _is_shown(scheme, note, report, label):
        return None
    if note.scope == ROUNDING:
        return _tested_rounding(scheme, report, label, note, same_tensor) if is_of_this_case else None
    if note.endswith(ZERO_ADDEND):
        return _tested_zero_addend(scheme, report, label, note, same_tensor) if is_of_this_case else None
    comparable = [other for other in same_tensor if other is not origin and _applies(scheme, note, other, label)]
    same_mesh = [other for other in comparable if other.case.mesh == origin.case.mesh]
    other_meshes = [other for other in comparable if other.case.mesh != origin.case.mesh]
    relevant = comparable if note.scope == ACROSS_MESHES else same_mesh
    # 1. The claims that all of them support; a hypothesis from another case needs at least one.
    supported = _supported(scheme, note, relevant if relevant or is_of_this_case else [report], label)
    if supported is None:
        return None
    # 2. The sizes of the other case it comes from, or the wording of a larger case.
    if not is_of_this_case:
        supported = supported.extended(f" (at {sizes(origin.case)})")
    elif relevant:
        supported = _clearer(supported, label, relevant)
    # 3. A mesh on which it does not hold, or a remark that it is untested.
    refuted_on = next((o for o in other_meshes if not _is_shown(scheme, note, o, label)), None)
    if refuted_on is not None:
        return supported.extended(f"{NOT_SO_ON}{mesh_text(refuted_on.case.mesh)}")
    return supported if relevant or not is_of_this_case else _untested(note)


def _tested_rounding(
    scheme: Declared, report: Report, label: str, note: Note, same_tensor: Sequence[Report]
) -> Note | None:
    """The claim of the note, if each failing case has a note on rounding and the error vanishes like a rounding error.

    If no case can tell, the note says only how large the error is.
    """
    if not all(any(n.scope == ROUNDING for n in other.notes[label]) for other in same_tensor):
        return None
    if report.case.dtype not in NARROW:
        dtypes = narrow_dtypes(scheme, report.case)
        if dtypes:
            note = _with_dtypes(note, COARSER[report.case.dtype], dtypes)
        elif dtypes is not None and not any(claim.startswith(SMALL_ERROR) for claim in note.claims):
            return None
    ((claim, confirmed),) = note.claims.items()
    is_rounding = vanishes(scheme, report, label)
    if is_rounding is None:
        return _untested(note)
    return Note(confirmed, ROUNDING, claim) if is_rounding else None


def _with_dtypes(note: Note, coarse: str, dtypes: set[str]) -> Note:
    """The note of a function with tensors of these narrower dtypes: float16 rounds less than bfloat16 too."""
    names = " or ".join(sorted(dtypes))

    def reworded(text: str) -> str:
        if CANCELS in text:
            return text.replace(CANCELS, f"tensors of {names}, or {CANCELS}")
        return text if coarse in dtypes else text.replace(coarse, names)

    return Note(reworded(note), ROUNDING, {reworded(claim): reworded(words) for claim, words in note.claims.items()})


def _tested_zero_addend(
    scheme: Declared, report: Report, label: str, note: Note, same_tensor: Sequence[Report]
) -> Note | None:
    """The note, if each failing case on the mesh supports it and no passing case has the same zeros.

    A passing case has them if the rank has no share in the sum, like a pipeline stage without a part in the loss.
    """
    same_mesh = [other for other in same_tensor if other.case.mesh == report.case.mesh]
    if not all(note.supported_by(other.notes[label]) for other in same_mesh):
        return None
    return _compared_with_passing(scheme, report.case, label, note)


def _applies(scheme: Declared, note: Note, report: Report, label: str) -> bool:
    """Whether a report could show the pattern of a note."""
    return note.applies is None or note.applies(_evidence(scheme, report, label))


def _is_shown(scheme: Declared, note: Note, report: Report, label: str) -> bool:
    """Whether a report supports a note, or shows its pattern in addition to its own notes."""
    if note.supported_by(report.notes[label]):
        return True
    return note.fits is not None and note.fits(_evidence(scheme, report, label))


def _supported(scheme: Declared, note: Note, reports: Sequence[Report], label: str) -> Note | None:
    """The note with the claims that every report supports; None if no claim is left."""
    supported: Note | None = note
    for report in reports:
        has_number = bool(note.implied)  # every report must then have such a note
        if has_number or not _is_shown(scheme, note, report, label):
            supported = supported and supported.supported_by(report.notes[label])
    return supported


def _clearer(note_on_few: Note, label: str, relevant: Sequence[Report]) -> Note:
    """For a note that rests on one element, or one per region, the wording of a larger case."""
    if not _rests_on_few(note_on_few):
        return note_on_few
    for other in relevant:
        for note in other.notes[label]:
            narrowed = None if _rests_on_few(note) else note.supported_by([note_on_few])
            if narrowed is not None:
                return narrowed.extended(f" (at {sizes(other.case)})")
    return note_on_few


def _rests_on_few(note: Note) -> bool:
    return note.endswith(SINGLE_ELEMENT) or ALL_THERE in note


def _untested(note: Note) -> Note:
    """The note; a hypothesis is marked as from one case, unless it already says that it rests on a single element."""
    says_less = note.endswith(SINGLE_ELEMENT)
    return note if note.scope not in HYPOTHESES or says_less else note.extended(UNTESTED)


def _of_the_call(report: Report, notes: Mapping[str, Sequence[Note]]) -> dict[str, tuple[Note, ...]]:
    """The notes; if a case fails only under its calling conditions, a note on another order names the condition.

    If no note is on another order and another call is needed, its state comes first.
    """
    conditions = set(report.case.conditions) if report.conditions_needed else set()
    if conditions.intersection(OTHER_CALLS):
        cause, state = OF_OTHER_CALL, (Note(RIGHT_WITHOUT_CALL),)
    elif conditions.intersection(VIEWS):
        cause, state = "memory: a view is read as if it were contiguous", ()
    else:
        return {label: tuple(each) for label, each in notes.items()}
    order = Note(f"{ORDER_OF}{cause}")
    by_label = {}
    for label, each in notes.items():
        named = tuple(dict.fromkeys(order if note.startswith(SAME_VALUES) else note for note in each))
        rest = tuple(note for note in named if not note.startswith(NO_PATTERN))
        by_label[label] = named if order in named or not state else (*state, *rest)
    return by_label


def _compared_with_passing(scheme: Declared, case: CaseSpec, label: str, note: Note) -> Note | None:
    """The note on an addend of zeros, if that rank's addend is nonzero in a passing case.

    The passing case has the same mesh and options.
    """
    tried = (cases.of_drawn_sizes(scheme, case, number) for number in range(PASSING_TRIED))
    for report in cases.reports(scheme, tried):
        tensor = next(tensor for tensor in report.tensors if tensor.label == label) if report.ok else None
        if tensor is not None and tensor.want.any():
            at = tensor.stitched.coordinates[tensor.copy]
            by_rank = {axis: tensor.stitched.by_rank(axis, at) for axis in tensor.stitched.part_axes}
            evidence = replace(_evidence(scheme, report, label), by_rank=by_rank, at=at)
            is_zero = any(note.claims.keys() & other.claims.keys() for other in zero_addend(evidence))
            return None if is_zero else note.extended(", unlike in cases that pass")
    return note.extended(", which is right only if this rank has no share in the sum")
