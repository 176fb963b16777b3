"""Name the small edit of a function that makes all of its tensors right: what the line should have been.

A wrong output may have no pattern in its numbers, as after a maximum of each rank's own part, a collective over the
wrong ranks, or a mean of local values inside a variance. So the case runs again with one edit at a time: an all_reduce
left out, with another operation or over other ranks; a collective after an operation; a write that adds; a sum of an
input's terms. If only gradients are wrong, the operations and writes of hand-written backwards are edited: a sum may
be of one rank's part. An edit is named only if every tensor of the failing cases, and of a case on another mesh, is
right with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, combinations, islice, product, starmap
from typing import Any

from torch.overrides import TorchFunctionMode

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.ledger import LedgerRow
from shardproof.engines.lockstep.repair import ALL_RANKS, OF_STATISTICS, OMIT, REDUCE, Repair, under
from shardproof.engines.program import Program
from shardproof.experiments import cases
from shardproof.experiments.combined_operations import (
    ASSIGNMENT,
    BOUNDED,
    COUNTS,
    HOW_OF,
    WRITES,
    Combiner,
    Operation,
    Recorder,
    Writer,
)
from shardproof.experiments.right_apart import JudgedCase, judged_cases
from shardproof.experiments.unsummed_edges import Graph, with_graph
from shardproof.experiments.unsummed_inputs import sums_of_inputs
from shardproof.explain.arithmetic import names_a_number
from shardproof.explain.clues import FORWARD_EQUAL
from shardproof.explain.note import OBSERVED, READ_TOO_EARLY, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

MAX_EDITS = 60  # runs of the failing case
MAX_PER_AXIS = 20  # operations after which a collective over one axis is tried
MAX_PAIRS = 6  # of statistics, of sums, and of sums with bounded ones, that are tried together
SUMMABLE = ("all_reduce", "all_gather")
RIGHT_ONCE = "right once "
Notes = Mapping[str, tuple[Note, ...]]


@dataclass(frozen=True)
class Edit:
    """The words that name an edit, and the wrapper that makes it in a program.

    If the `control`, another wrapper, makes the program right too, the words do not apply.
    """

    words: str
    wrap: Callable[[Program], Callable[..., Any]]
    control: Callable[[Program], Callable[..., Any]] | None = None


def name_edits(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, Any]:
    """The notes, with one on the edit that makes every tensor right, if a tensor is wrong and none names a cause.

    Cost: up to MAX_EDITS runs of the failing case, and for each edit that mends it one of each other failing case.
    """

    def edits(clearest: Report) -> Iterable[Edit]:
        needs_ranks = not _needs_no_ranks(scheme, report, clearest)
        if not wrong_outputs(report):
            of_writes = _of_writes(scheme, clearest, in_backwards)
            return chain(of_writes, _of_backwards(scheme, clearest)) if needs_ranks else of_writes
        of_writes = _of_writes(scheme, clearest, in_mode)
        if not needs_ranks:
            return of_writes
        of_inputs = list(starmap(Edit, sums_of_inputs(scheme, clearest.case)))
        of_lines = chain(_of_collectives(clearest), of_writes, _of_operations(scheme, clearest))
        return chain(islice(of_lines, MAX_EDITS - len(of_inputs)), of_inputs)

    return _named(scheme, report, failing, notes, edits)


def name_edits_of_two(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, Any]:
    """The same for collectives after two operations at once, which may also lead around a mistake in a later line.

    So they are tried after the edits of one line. Cost: as of `name_edits`.
    """

    def edits(clearest: Report) -> Iterable[Edit]:
        if not wrong_outputs(report) or _needs_no_ranks(scheme, report, clearest):
            return ()
        return _of_two_operations(scheme, clearest)

    return _named(scheme, report, failing, notes, edits)


def _named(
    scheme: Declared,
    report: Report,
    failing: Sequence[Report],
    notes: Notes,
    edits_of: Callable[[Report], Iterable[Edit]],
) -> dict[str, Any]:
    by_label = dict(notes)
    wrong = wrong_outputs(report) or [tensor.label for tensor in report.tensors if not tensor.ok]
    unnamed = [label for label in wrong if not any(map(_names_a_cause, notes.get(label, ())))]
    if not unnamed or SPARE in report.case.mesh:
        return by_label
    clearest = min([report, *failing], key=lambda other: (_ranks_alike(other.case), other is not report))
    if _is_right(verify_case(scheme, clearest.case)):  # the report is of given arrays, or the function keeps state
        return by_label
    others = [other.case for other in (report, *failing) if other is not clearest]
    others += [case for case in (cases.on_another_mesh(scheme, report.case, 4),) if case is not None]
    edit = next(_that_mend(scheme, clearest, others, islice(edits_of(clearest), MAX_EDITS)), None)
    if edit is None:
        return by_label
    for label, of_tensor in notes.items():
        rest = [note for note in of_tensor if not note.startswith(NO_PATTERN)]
        strong = [note for note in rest if _names_a_cause(note)]
        by_label[label] = (*strong, Note(f"{RIGHT_ONCE}{edit.words}", OBSERVED), *(n for n in rest if n not in strong))
    return by_label


def _names_a_cause(note: Note) -> bool:
    return names_a_number(note) or note.startswith((RIGHT_ONCE, f"{FORWARD_EQUAL}: ")) or READ_TOO_EARLY in note


def wrong_outputs(report: Report) -> list[str]:
    return [tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok]


def _ranks_alike(case: CaseSpec) -> tuple[bool, int]:
    """How little a case tells axes apart: whether one of them spans all ranks, and how many have one rank."""
    return case.world in case.mesh.values(), sum(size == 1 for size in case.mesh.values())


def _needs_no_ranks(scheme: Declared, report: Report, clearest: Report) -> bool:
    """Whether one rank is enough for the failure, so that no collective can be to blame."""
    if clearest.case.world == 1:
        return True
    on_one_rank = next(cases.reports(scheme, [cases.on_one_rank(scheme, report.case)]), None)
    return on_one_rank is not None and not _is_right(on_one_rank)


def _that_mend(scheme: Declared, report: Report, others: Sequence[CaseSpec], edits: Iterable[Edit]) -> Iterator[Edit]:
    """The edits with which all tensors of all these cases are right."""
    failing = JudgedCase.of(scheme, report.case)
    others_judged = cache(partial(judged_cases, scheme, others))  # most edits mend not even the first case

    def mends(wrap: Callable[[Program], Callable[..., Any]]) -> bool:
        return failing.is_right(scheme, wrap) and all(each.is_right(scheme, wrap) for each in others_judged())

    for edit in edits:
        if mends(edit.wrap) and not (edit.control and mends(edit.control)):
            yield edit


def _is_right(report: Report) -> bool:
    return report.failure is None and all(tensor.ok for tensor in report.tensors)


# Edits of collectives.


def _of_collectives(report: Report) -> Iterator[Edit]:
    """Each line's all_reduce left out, with another operation, over another axis or over all ranks.

    Each line's all_gather as a sum, for a function that reads one rank's entry.
    """
    case, lines = report.case, dict[tuple[str, str, str], LedgerRow]()
    for row in report.ledger.rows:
        if row.op in SUMMABLE and row.phase == "fwd" and row.source != "?" and len(row.group) > 1:
            lines.setdefault((row.op, row.source, row.reduce_op or ""), row)
    axes = [axis for axis, size in case.mesh.items() if size > 1]
    for row in lines.values():
        if row.op == "all_gather":
            repair = Repair(row.op, row.source, "fwd", REDUCE, reduce_op="SUM")
            words = f"{repair.site} adds up the ranks' tensors, of which the function reads one"
            yield Edit(words, under(repair), _twice(repair, row))
            continue
        repair = Repair("all_reduce", row.source, "fwd", REDUCE)
        for op in ("SUM", "AVG", "MAX", *OF_STATISTICS):
            if op != row.reduce_op:
                other = replace(repair, reduce_op=op)
                yield Edit(f"{repair.site} takes {op}, not {row.reduce_op}", under(other), _twice(other, row))
        yield Edit(f"{repair.site} is left out", under(replace(repair, action=OMIT)))
        of_group = f"all {case.world} ranks" if len(row.group) == case.world else row.group_name
        for axis in (*axes, ALL_RANKS) if len(axes) > 1 else ():
            if axis != row.group_name and not (axis == ALL_RANKS and len(row.group) == case.world):
                over = f"{repair.site} is over {axis}, not over {of_group}"
                yield Edit(over, under(replace(repair, axis=axis)))


def _twice(repair: Repair, row: LedgerRow) -> Callable[[Program], Program] | None:
    """A control for counts: if twice the combined count is right too, the sum explains nothing."""
    are_counts = all(dtype.startswith(("int", "uint")) for dtype in row.dtypes)
    return under(replace(repair, times=2)) if are_counts else None


# Edits of operations.


def _operations(scheme: Declared, report: Report, within: InMode) -> dict[Operation, bool]:
    """The operations of rank 0, each with whether it reduces."""
    operations: dict[Operation, bool] = {}
    verify_case(scheme, report.case, wrap_program=within(lambda mesh: Recorder(operations)))
    return operations


def _of_writes(scheme: Declared, report: Report, within: InMode) -> Iterator[Edit]:
    """Each write to places that ids give, as an addition."""
    for operation in _operations(scheme, report, within):
        if operation.name in WRITES:
            name = "the assignment" if operation.name == ASSIGNMENT else operation.name
            words = f"{name} at {operation.source} adds: of two values for one place only the last remains"
            yield Edit(words, within(lambda mesh, each=operation: Writer(each)))


def _of_operations(scheme: Declared, report: Report) -> Iterator[Edit]:
    """A collective over an axis after each operation that reduces, then after any other; then means of counts.

    Operations are all calls of a function in a line; where a line has several that reduce, each is tried alone too.
    The mean of the ranks' counts is what ranks divide by if each divides by their number as well.
    """
    calls = _operations(scheme, report, in_mode)
    operations = _of_lines(calls)
    reducing = [(operation,) for operation, reduces in operations.items() if reduces]
    others = [(operation,) for operation, reduces in operations.items() if not reduces]
    counts = [operation for operation in operations if operation.name in COUNTS or operation.how == BOUNDED]
    means = [(replace(operation, way="mean"),) for operation in counts]
    for together in (*reducing, *_of_several(calls), *others, *means):
        yield from _collective_after(scheme, report, together)


def _of_two_operations(scheme: Declared, report: Report) -> Iterator[Edit]:
    operations = _of_lines(_operations(scheme, report, in_mode))
    for together in _pairs(operations):
        yield from _collective_after(scheme, report, together)


def _of_backwards(scheme: Declared, report: Report) -> Iterator[Edit]:
    """A collective over an axis after each operation of a hand-written backward that reduces, after two, after others.

    A gather gives the same as a sum of each rank's part among zeros.
    """
    operations = _of_lines(_operations(scheme, report, in_backwards))
    reducing = [(operation,) for operation, reduces in operations.items() if reduces]
    others = [(operation,) for operation, reduces in operations.items() if not reduces]
    for together in (*reducing, *_pairs(operations), *others):
        yield from _collective_after(scheme, report, together, in_backwards)


def _pairs(operations: Mapping[Operation, bool]) -> Iterator[tuple[Operation, Operation]]:
    """At most MAX_PAIRS pairs of statistics, of sums, and of sums with bounded ones."""
    bounds = [operation for operation in operations if operation.how == BOUNDED]
    statistics = [operation for operation in operations if operation.name in HOW_OF and operation not in bounds]
    sums = [operation for operation, reduces in operations.items() if reduces and operation.name not in HOW_OF]
    alike = (combinations(statistics, 2), combinations(sums, 2), product(sums, bounds))
    return (pair for each in alike for pair in islice(each, MAX_PAIRS))


def _of_lines(calls: Mapping[Operation, bool]) -> dict[Operation, bool]:
    """At most MAX_PER_AXIS operations, each with whether it reduces, those that do first."""
    operations: dict[Operation, bool] = {}
    for call, reduces in calls.items():
        operations[call.of_line] = operations.get(call.of_line, False) or reduces
    chosen = sorted(operations, key=lambda operation: not operations[operation])[:MAX_PER_AXIS]
    return {operation: operations[operation] for operation in chosen}


def _collective_after(
    scheme: Declared, report: Report, together: Sequence[Operation], within: InMode | None = None
) -> Iterator[Edit]:
    axes = [axis for axis, size in report.case.mesh.items() if size > 1]
    has_backward = within is None and any(arg.differentiable for arg in scheme.inputs)
    # The gradient of a maximum belongs to the rank that has it; of a shift, the ranks have parts that add up to 0.
    ways = (False, True) if together[0].how == "maximum" else (True, False)
    for axis, sums_gradients in product(axes, ways if has_backward else (False,)):
        of_ranks, control = (
            (within or in_mode)(partial(_combiner, together, axis, sums_gradients, of_equal_ranks))
            for of_equal_ranks in (False, True)
        )
        yield Edit(_words(together, axis), of_ranks, control)


def _of_several(calls: Mapping[Operation, bool]) -> list[tuple[Operation]]:
    """Each call that reduces in a line with several of its function."""
    counts = Counter(call.of_line for call in calls)
    return [(call,) for call, reduces in calls.items() if reduces and call.call and counts[call.of_line] > 1]


def _combiner(
    together: Sequence[Operation], axis: str, sums_gradients: bool, of_equal_ranks: bool, mesh: Any
) -> Combiner:
    return Combiner(together, mesh[axis], sums_gradients=sums_gradients, of_equal_ranks=of_equal_ranks)


def _words(together: Sequence[Operation], axis: str) -> str:
    calls = ((f"`{each.call}`" if each.call else each.name, each.source) for each in together)
    what = " and ".join(f"{call} at {source}" for call, source in calls)
    if len(together) > 1:
        return f"{what} are over all ranks of {axis}, not over each rank's own part"
    return f"{what} is the {together[0].how} over all ranks of {axis}, not of each rank's own part"


Wrapper = Callable[[Program], Program]
InMode = Callable[[Callable[[Any], TorchFunctionMode]], Wrapper]


def in_mode(mode_of: Callable[[Any], TorchFunctionMode]) -> Wrapper:
    """A wrapper that runs each rank's function in the mode that `mode_of` makes of its mesh."""

    def wrap(program: Program) -> Program:
        def fn(mesh: Any, **arguments: Any) -> Any:
            with mode_of(mesh):
                return program.fn(mesh, **arguments)

        return replace(program, fn=fn)

    return wrap


def in_backwards(mode_of: Callable[[Any], TorchFunctionMode]) -> Wrapper:
    """The same for the hand-written backwards alone, which run in the mode."""

    def surround(mesh: Any, graph: Graph) -> None:
        for node in {node: None for edge, node, _ in graph if edge.is_handwritten}:
            entered: list[TorchFunctionMode] = []

            def enter(gradients: Any, entered: list[TorchFunctionMode] = entered) -> None:
                entered.append(mode_of(mesh).__enter__())

            def leave(gradients: Any, cotangents: Any, entered: list[TorchFunctionMode] = entered) -> None:
                entered.pop().__exit__(None, None, None)

            node.register_prehook(enter)
            node.register_hook(leave)

    return with_graph(surround)
