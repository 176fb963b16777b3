"""Name the small edit of a function that makes all of its tensors right: what the line should have been.

A wrong output may have no pattern in its numbers, as after a maximum of each rank's own part, a collective over the
wrong ranks, or a mean of local values inside a variance. So the case runs again with one edit at a time: an all_reduce
left out, with another operation or over other ranks; a collective after an operation; a write that adds. An edit is
named only if every tensor of the failing cases, and of a case on another mesh, is right with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.ledger import LedgerRow, base, is_plumbing
from shardproof.engines.lockstep.repair import ALL_RANKS, OMIT, REDUCE, Repair, under
from shardproof.engines.program import Program
from shardproof.experiments import cases
from shardproof.experiments.right_apart import JudgedCase
from shardproof.explain.note import ACROSS_MESHES, OBSERVED, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case
from torch_impl.collectives import all_reduce
from torch_impl.contract import GradientType

MAX_EDITS = 60  # runs of the failing case
MAX_PER_AXIS = 20  # operations after which a collective over one axis is tried
RIGHT_ONCE = "right once "
Notes = Mapping[str, tuple[Note, ...]]

# The operations that say how the ranks' results are combined; after any other one, a sum is tried.
MAXIMA: tuple[str, ...] = ("amax", "max", "cummax", "relu", "maximum")
MEANS: tuple[str, ...] = ("mean", "nanmean")
VARIANCES: tuple[str, ...] = ("var", "std")
SUMS = ("sum", "nansum", "count_nonzero", "bincount", "einsum", "matmul", "mm", "bmm", "linear", "norm", "dot")
ASSIGNMENT = "__setitem__"
WRITES = {"scatter": "scatter_add", "scatter_": "scatter_add_", "index_copy": "index_add", "index_copy_": "index_add_"}
WRITES[ASSIGNMENT] = "index_put_"
OPERATION_OF: dict[str, str] = {
    name: how for how, names in {"MAX": MAXIMA, "AVG": MEANS, "VAR": VARIANCES}.items() for name in names
}
WORDS_OF = {"MAX": "maximum", "AVG": "mean", "SUM": "sum", "VAR": "variance"}


@dataclass(frozen=True)
class Operation:
    """The calls of one torch function that a user's line makes."""

    name: str
    source: str


@dataclass(frozen=True)
class Edit:
    """Words for what is right, and the wrapper that makes a program so."""

    words: str
    wrap: Callable[[Program], Callable[..., Any]]


def name_edits(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, Any]:
    """The notes, with one on the edit that makes every tensor right, if an output is wrong and none names a cause.

    Cost: up to MAX_EDITS runs of the failing case, and for each edit that mends it one of each other failing case.
    """
    by_label = dict(notes)
    wrong_outputs = [tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok]
    unnamed = [label for label in wrong_outputs if not any(map(_names_a_cause, notes.get(label, ())))]
    if not unnamed or SPARE in report.case.mesh:
        return by_label
    clearest = min([report, *failing], key=lambda other: (_ranks_alike(other.case), other is not report))
    if _is_right(verify_case(scheme, clearest.case)):  # the report is of given arrays, or the function keeps state
        return by_label
    others = [other.case for other in (report, *failing) if other is not clearest]
    others += [case for case in (cases.on_another_mesh(scheme, report.case, 4),) if case is not None]
    edits = _of_writes(scheme, clearest)
    if clearest.case.world > 1 and not _fails_on_one_rank(scheme, report):
        edits = chain(_of_collectives(clearest), edits, _of_operations(scheme, clearest))
    edit = next(_that_mend(scheme, clearest, others, islice(edits, MAX_EDITS)), None)
    if edit is None:
        return by_label
    for label, of_tensor in notes.items():
        rest = [note for note in of_tensor if not note.startswith(NO_PATTERN)]
        strong = [note for note in rest if _names_a_cause(note)]
        by_label[label] = (*strong, Note(f"{RIGHT_ONCE}{edit.words}", OBSERVED), *(n for n in rest if n not in strong))
    return by_label


def _names_a_cause(note: Note) -> bool:
    return note.scope == ACROSS_MESHES or note.startswith(RIGHT_ONCE)


def _ranks_alike(case: CaseSpec) -> tuple[bool, int]:
    """How little a case tells axes apart: whether one of them spans all ranks, and how many have one rank."""
    return case.world in case.mesh.values(), sum(size == 1 for size in case.mesh.values())


def _fails_on_one_rank(scheme: Declared, report: Report) -> bool:
    on_one_rank = next(cases.reports(scheme, [cases.on_one_rank(scheme, report.case)]), None)
    return on_one_rank is not None and not _is_right(on_one_rank)


def _that_mend(scheme: Declared, report: Report, others: Sequence[CaseSpec], edits: Iterable[Edit]) -> Iterator[Edit]:
    """The edits with which all tensors of all these cases are right."""
    failing = JudgedCase.of(scheme, report.case)
    for edit in edits:
        if failing.is_right(scheme, edit.wrap) and all(map(_is_right, cases.reports(scheme, others, edit.wrap))):
            yield edit


def _is_right(report: Report) -> bool:
    return report.failure is None and all(tensor.ok for tensor in report.tensors)


# Edits of collectives.


def _of_collectives(report: Report) -> Iterator[Edit]:
    """Each line's all_reduce left out, with another operation, over another axis or over all ranks."""
    case, lines = report.case, dict[tuple[str, str], LedgerRow]()
    for row in report.ledger.rows:
        if row.op == "all_reduce" and row.phase == "fwd" and row.source != "?" and len(row.group) > 1:
            lines.setdefault((row.source, row.reduce_op or ""), row)
    axes = [axis for axis, size in case.mesh.items() if size > 1]
    for row in lines.values():
        repair = Repair("all_reduce", row.source, "fwd", REDUCE)
        for op in ("SUM", "AVG", "MAX"):
            if op != row.reduce_op:
                words = f"{repair.site} takes {op}, not {row.reduce_op}"
                yield Edit(words, under(replace(repair, reduce_op=op)))
        yield Edit(f"{repair.site} is left out", under(replace(repair, action=OMIT)))
        of_group = f"all {case.world} ranks" if len(row.group) == case.world else row.group_name
        for axis in (*axes, ALL_RANKS) if len(axes) > 1 else ():
            if axis != row.group_name and not (axis == ALL_RANKS and len(row.group) == case.world):
                over = f"{repair.site} is over {axis}, not over {of_group}"
                yield Edit(over, under(replace(repair, axis=axis)))


# Edits of operations.


def _operations(scheme: Declared, report: Report) -> dict[Operation, bool]:
    """The operations of rank 0, each with whether it reduces."""
    operations: dict[Operation, bool] = {}
    verify_case(scheme, report.case, wrap_program=_in_mode(lambda mesh: _Recorder(operations)))
    return operations


def _of_writes(scheme: Declared, report: Report) -> Iterator[Edit]:
    """Each write to places that ids give, as an addition."""
    for operation in _operations(scheme, report):
        if operation.name in WRITES:
            name = "the assignment" if operation.name == ASSIGNMENT else operation.name
            words = f"{name} at {operation.source} adds: of two values for one place only the last remains"
            yield Edit(words, _in_mode(lambda mesh, each=operation: _Writer(each)))


def _of_operations(scheme: Declared, report: Report) -> Iterator[Edit]:
    """A collective over an axis after each operation, reductions first."""
    operations = _operations(scheme, report)
    axes = [axis for axis, size in report.case.mesh.items() if size > 1]
    for operation in sorted(operations, key=lambda operation: not operations[operation])[:MAX_PER_AXIS]:
        how = OPERATION_OF.get(operation.name, "SUM")
        for axis in axes:
            whole = f"the {WORDS_OF[how]} over all ranks of {axis}, not of each rank's own part"
            outs: tuple[GradientType, ...] = ("R", "I") if how != "MAX" else ("I",)
            for out in outs:
                mode = _collective_after(operation, axis, how, out)
                yield Edit(f"{operation.name} at {operation.source} is {whole}", _in_mode(mode))


def _in_mode(mode_of: Callable[[Any], TorchFunctionMode]) -> Callable[[Program], Program]:
    """A wrapper that runs each rank's function in the mode that `mode_of` makes of its mesh."""

    def wrap(program: Program) -> Program:
        def fn(mesh: Any, **arguments: Any) -> Any:
            with mode_of(mesh):
                return program.fn(mesh, **arguments)

        return replace(program, fn=fn)

    return wrap


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.startswith("__") and name not in WRITES:
            return func(*args, **(kwargs or {}))
        return self.run(func, Operation(name, _line()), args, dict(kwargs or {}))

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Recorder(_Mode):
    """Notes the operations of rank 0 that return a new tensor of numbers, and which of them reduce."""

    def __init__(self, operations: dict[Operation, bool]) -> None:
        super().__init__()
        self._operations = operations

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        value = _value_of(result)
        if dist.get_rank() or not operation.source or first is None:
            return result
        if operation.name in WRITES:
            if operation.name != ASSIGNMENT or _places(args[1]):
                self._operations[operation] = False
        elif value is not None and not (value._is_view() or value is first or operation.name.endswith("_")):
            is_reduction = operation.name in (*OPERATION_OF, *SUMS) or value.numel() < first.numel()
            self._operations.setdefault(operation, is_reduction)
        return result


class _Writer(_Mode):
    """Adds where an operation writes, into zeros."""

    def __init__(self, edited: Operation) -> None:
        super().__init__()
        self._edited = edited

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation != self._edited:
            return func(*args, **kwargs)
        if operation.name != ASSIGNMENT:
            return getattr(args[0], WRITES[operation.name])(*args[1:], **kwargs)
        x, places, value = args[:3]
        if _places(places):
            value = torch.as_tensor(value, dtype=x.dtype)
            return x.index_put_(_places(places), value, accumulate=True)
        return func(*args, **kwargs)


class _Combiner(_Mode):
    """Combines the ranks' results of one operation."""

    def __init__(self, edited: Operation, group: Any, how: str, out: GradientType) -> None:
        super().__init__()
        self._edited, self._group, self._how = edited, group, how
        self._out: GradientType = out

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation != self._edited:
            return func(*args, **kwargs)
        if self._how == "VAR":
            return self._variance(func, args, kwargs)
        result = func(*args, **kwargs)
        value = _value_of(result)
        combined = None if value is None else self._combined(value)
        return result if combined is None else combined if value is result else type(result)((combined, *result[1:]))

    def _combined(self, value: Tensor) -> Tensor:
        if self._how == "MAX":
            total = value.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self._group)
            return torch.where(value.detach() == total, value, total)
        total = (
            all_reduce(value, self._group, out=self._out) if value.is_floating_point() else _summed(value, self._group)
        )
        return total / dist.get_world_size(self._group) if self._how == "AVG" else total

    def _variance(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The variance about the mean of all ranks, with the divisor of each rank's own."""
        x, *rest = args
        dims = rest[0] if rest and not isinstance(rest[0], bool) else kwargs.get("dim")
        ranks = dist.get_world_size(self._group)
        shift = x.mean(dims, keepdim=True) - all_reduce(x.mean(dims, keepdim=True), self._group, out=self._out) / ranks
        local = func(*args, **kwargs)
        square = (local**2 if func.__name__ == "std" else local) + shift.reshape(local.shape) ** 2
        total = all_reduce(square, self._group, out=self._out) / ranks
        return total.sqrt() if func.__name__ == "std" else total


def _collective_after(
    operation: Operation, axis: str, how: str, out: GradientType
) -> Callable[[Any], TorchFunctionMode]:
    return lambda mesh: _Combiner(operation, mesh[axis], how, out)


def _summed(value: Tensor, group: Any) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _places(index: Any) -> tuple[Tensor, ...]:
    """The tensors of ids that index the leading dims; empty if a slice, a number or a mask does."""
    parts = index if isinstance(index, tuple) else (index,)
    are_ids = all(isinstance(part, Tensor) and part.dtype == torch.int64 and part.dim() for part in parts)
    return tuple(parts) if are_ids else ()


def _value_of(result: Any) -> Tensor | None:
    """The tensor of numbers that an operation returns: `values` of a maximum along a dim."""
    first: Any = result[0] if isinstance(result, tuple) and result else result
    is_plain = type(first) in (Tensor, torch.nn.Parameter)
    return first if is_plain and first.dtype != torch.bool else None


def _line() -> str:
    """file:line of the user's call, the innermost frame outside torch, Python and the harness."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not is_plumbing(frame.f_code.co_filename):
            return f"{base(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
