"""Name the operation that first makes NaN or infinity, if a result is not finite but the reference is.

An exponential without a shift overflows, a masked row has no maximum, a cast to a narrow dtype is too narrow. All later
results are then not finite either, so the place in the output says little. A note names an operation that turns finite
numbers into infinity, or numbers into NaN, if every output is finite once the operation returns 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardproof.declare.declared import Declared
from shardproof.experiments.combined_operations import Mode, Operation, value_of
from shardproof.experiments.edited_programs import in_mode
from shardproof.explain.named_numbers import number_text
from shardproof.explain.note import READ_TOO_EARLY, Note
from shardproof.explain.places import NOT_FINITE
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

FILLS = (
    "masked_fill",
    "masked_fill_",
    "where",
    "fill_",
    "clamp",
    "nan_to_num",
)  # the user asks for the values that these make
MOST_OPERATIONS = 8  # more are not tried
FIRST_MADE_BY = "first made by "
Notes = Mapping[str, tuple[Note, ...]]


def name_first_overflow(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes, with the operation that first makes the NaN or the infinity of an output.

    Cost: 1 + MOST_OPERATIONS runs of the case.
    """
    by_label = dict(notes)
    outputs = [tensor.label for tensor in report.tensors if tensor.role == "output"]
    is_not_finite = {
        label: any(note.startswith(NOT_FINITE) and READ_TOO_EARLY not in note for note in notes.get(label, ()))
        for label in outputs
    }
    if not any(is_not_finite.values()):
        return by_label
    found = Overflows()
    verify_case(scheme, report.case, wrap_program=in_mode(partial(Watcher, found.add)))
    for operation in list(found.largest)[:MOST_OPERATIONS]:
        mended = verify_case(scheme, report.case, wrap_program=in_mode(partial(Watcher, partial(with_ones, operation))))
        if mended.failure is None and not any(map(is_unexpected, _outputs(mended))):
            words = f"; {FIRST_MADE_BY}{operation.name} at {operation.source}{found.text(operation)}"
            for label in (label for label in outputs if is_not_finite[label]):
                by_label[label] = tuple(n.extended(words) if n.startswith(NOT_FINITE) else n for n in by_label[label])
            break
    return by_label


def _outputs(report: Report) -> Sequence[Any]:
    return [tensor for tensor in report.tensors if tensor.role == "output"]


def is_unexpected(tensor: Any) -> bool:
    """Whether a tensor is not finite where the reference is."""
    return bool((~np.isfinite(tensor.stitched.copies) & np.isfinite(tensor.want)).any())


@dataclass
class Overflows:
    """The operations of all ranks that make NaN or infinity, in their order, each with its largest finite input."""

    largest: dict[Operation, float] = field(default_factory=dict)

    def add(self, operation: Operation, result: Any, numbers: Numbers) -> Any:
        value = value_of(result)
        if value is not None and numbers.make(operation.name, value):
            self.largest[operation] = max(numbers.largest, self.largest.get(operation, 0.0))
        return result

    def text(self, operation: Operation) -> str:
        largest = self.largest[operation]
        return f", of numbers up to {number_text(largest)}" if largest else ""


Seen = Callable[[Operation, Any, "Numbers"], Any]  # an operation, its result, its inputs -> another result


class Watcher(Mode):
    """Passes each result with NaN or infinity through `seen`, which returns the result or a replacement."""

    def __init__(self, seen: Seen, mesh: Any) -> None:
        super().__init__()
        self._seen = seen

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = {name: value for name, value in kwargs.items() if name != "out"}
        given = [x for x in tree_leaves((args, inputs)) if isinstance(x, Tensor) and x.is_floating_point()]
        numbers = Numbers.of(given)  # before an operation in place changes them
        result = func(*args, **kwargs)
        value = value_of(result)
        if not operation.source or operation.name in FILLS or not given or value is None:
            return result
        return result if bool(value.isfinite().all()) else self._seen(operation.of_line, result, numbers)


@dataclass(frozen=True)
class Numbers:
    """Where an operation's inputs are NaN, where they are finite, and the largest finite one."""

    is_nan: Sequence[Tensor]
    is_finite: Sequence[Tensor]
    largest: float

    @staticmethod
    def of(given: Sequence[Tensor]) -> Numbers:
        largest = max((float(x[x.isfinite()].abs().max()) for x in given if x.isfinite().any()), default=0.0)
        return Numbers([x.isnan() for x in given], [x.isfinite() for x in given], largest)

    def make(self, name: str, result: Tensor) -> bool:
        """Whether the operation made NaN from numbers, or infinity from finite numbers.

        A pointwise operation makes each element from those at its place: NaN in rows of padding is not the cause.
        """
        shape = result.shape
        if not is_pointwise(name) or torch.broadcast_shapes(*(each.shape for each in self.is_nan)) != shape:
            shape = torch.Size()  # all inputs count for each element, as for a sum
        per_element = [
            (nan.expand(shape), ~finite.expand(shape)) if shape else (nan.any(), (~finite).any())
            for nan, finite in zip(self.is_nan, self.is_finite, strict=True)
        ]
        was_nan, was_infinite = (torch.stack(each).any(0) for each in zip(*per_element, strict=True))
        made = (result.isnan() & ~was_nan) | (result.isinf() & ~was_infinite)
        return bool(made.any())


@cache
def is_pointwise(name: str) -> bool:
    """Whether each element of the operation's result follows from the elements at its place alone."""
    operation = getattr(torch.ops.aten, name, None)
    return operation is not None and any(
        torch.Tag.pointwise in getattr(operation, overload).tags for overload in operation.overloads()
    )


def with_ones(target: Operation, operation: Operation, result: Any, numbers: Numbers) -> Any:
    """The result; if the operation is the target, with 1 in place of NaN and infinity."""
    value = value_of(result)
    if operation != target or value is None:
        return result
    wrong = ~value.isfinite()
    if operation.name.endswith("_"):
        return result.masked_fill_(wrong, 1.0)
    mended = value.masked_fill(wrong, 1.0)
    return mended if value is result else type(result)((mended, *result[1:]))
