"""Name the line that reads an input which every rank adds before the sum.

The numbers tell that a bias is counted once for each rank, and not where it is added. So the failing cases run again
with one read of the input at a time divided by the number of ranks. The line of the last read with which the output is
right in all of them is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Declared
from shardproof.engines.program import Program
from shardproof.experiments.combined_operations import Mode, Operation
from shardproof.explain.arithmetic import ADDED_BEFORE, COUNTED
from shardproof.explain.note import Note
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

MOST_READS = 6
Notes = Mapping[str, tuple[Note, ...]]


class _Reads(Mode):
    """Notes the operations of rank 0 that read a tensor with the values of an input."""

    def __init__(self, value: Tensor, reads: dict[Operation, None]) -> None:
        super().__init__()
        self._value, self._reads = value, reads

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation.source and not dist.get_rank() and any(map(self.is_read, (*args, *kwargs.values()))):
            self._reads[operation] = None
        return func(*args, **kwargs)

    def is_read(self, arg: Any) -> bool:
        """Whether it is the input, a copy in another dtype or the parameter of a module that has its values."""
        value = self._value
        is_plain = type(arg) in (Tensor, torch.nn.Parameter)
        is_alike = is_plain and (arg.shape, arg.device) == (value.shape, value.device)
        return (
            is_alike
            and arg.is_floating_point()
            and torch.equal(arg.detach().to(torch.float64), value.to(torch.float64))
        )


class _Divided(_Reads):
    """Divides the input where one operation reads it."""

    def __init__(self, value: Tensor, read: Operation, ranks: int) -> None:
        super().__init__(value, {})
        self._read, self._ranks = read, ranks

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation != self._read:
            return func(*args, **kwargs)
        shares = (arg / self._ranks if self.is_read(arg) else arg for arg in args)
        return func(*shares, **{key: x / self._ranks if self.is_read(x) else x for key, x in kwargs.items()})


def name_counted_inputs(
    scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes
) -> dict[str, tuple[Note, ...]]:
    """The notes; one on an input that is counted once for each rank has the line that reads it.

    Cost: for each such input a run, and one for each of MOST_READS reads; for the named one a run of each failing case.
    """
    by_label = {label: tuple(of_tensor) for label, of_tensor in notes.items()}
    for label, of_tensor in by_label.items():
        first = next(iter(of_tensor), None)
        name, axis = _counted(scheme, report, first) if first is not None else ("", "")
        if first is None or not name:
            continue
        judged = [report, *(other for other in failing if label in other.notes)]
        read = next(
            (each for each in _reads(scheme, report, name) if _mends(scheme, judged, label, name, axis, each)), None
        )
        if read is not None:
            text = first.replace(ADDED_BEFORE, f"{ADDED_BEFORE}, in {read.source}")
            by_label[label] = (Note(text, first.scope, first.claims, sites=first.sites), *of_tensor[1:])
    return by_label


def _counted(scheme: Declared, report: Report, note: Note) -> tuple[str, str]:
    """The input and the axis of a note that says that each rank adds it; else empty."""
    pairs = ((arg.name, axis) for arg in scheme.inputs for axis in report.case.mesh)
    is_added = ADDED_BEFORE in note and len(note.claims) == 1
    return next((pair for pair in pairs if is_added and COUNTED.format(*pair) in note.claims), ("", ""))


def _reads(scheme: Declared, report: Report, name: str) -> list[Operation]:
    """The operations that read an input, the last one first."""
    reads: dict[Operation, None] = {}
    verify_case(scheme, report.case, wrap_program=_within(name, lambda value: _Reads(value, reads)))
    return list(reads)[::-1][:MOST_READS]


def _mends(scheme: Declared, judged: Sequence[Report], label: str, name: str, axis: str, read: Operation) -> bool:
    """Whether a tensor is right in all of these cases once the read takes the input divided by the ranks of an axis."""
    return all(_is_mended(scheme, each.case, label, name, axis, read) for each in judged)


def _is_mended(scheme: Declared, case: CaseSpec, label: str, name: str, axis: str, read: Operation) -> bool:
    divided = _within(name, lambda value: _Divided(value, read, case.mesh[axis]))
    report = verify_case(scheme, case, wrap_program=divided)
    return report.failure is None and all(tensor.ok for tensor in report.tensors if tensor.label == label)


def _within(name: str, mode_of: Callable[[Tensor], Mode]) -> Callable[[Program], Program]:
    """A wrapper that runs each rank's function in the mode that `mode_of` makes of the rank's input."""

    def wrap(program: Program) -> Program:
        def fn(mesh: Any, **arguments: Any) -> Any:
            value: Any = arguments
            for key in name.split("."):
                value = value[key]
            with mode_of(value.detach().clone()):
                return program.fn(mesh, **arguments)

        return replace(program, fn=fn)

    return wrap
