"""Name the operation that first makes NaN or infinity, if a result is not finite but the reference is.

An exponential without a shift overflows, a masked row has no maximum, a cast to a narrow dtype is too narrow. All later
results are then not finite either, so the place in the output says little. A note names an operation that turns finite
numbers into infinity, or numbers into NaN, if every output is finite once the operation returns 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    is_unexpected = {
        label: any(note.startswith(NOT_FINITE) and READ_TOO_EARLY not in note for note in notes.get(label, ()))
        for label in outputs
    }
    if not any(is_unexpected.values()):
        return by_label
    found = _Overflows()
    verify_case(scheme, report.case, wrap_program=in_mode(partial(_Watcher, found.add)))
    for operation in list(found.largest)[:MOST_OPERATIONS]:
        mended = verify_case(
            scheme, report.case, wrap_program=in_mode(partial(_Watcher, partial(_with_ones, operation)))
        )
        if mended.failure is None and not any(map(_is_unexpected, _outputs(mended))):
            words = f"; {FIRST_MADE_BY}{operation.name} at {operation.source}{found.text(operation)}"
            for label in (label for label in outputs if is_unexpected[label]):
                by_label[label] = tuple(n.extended(words) if n.startswith(NOT_FINITE) else n for n in by_label[label])
            break
    return by_label


def _outputs(report: Report) -> Sequence[Any]:
    return [tensor for tensor in report.tensors if tensor.role == "output"]


def _is_unexpected(tensor: Any) -> bool:
    """Whether a tensor is not finite where the reference is."""
    return bool((~np.isfinite(tensor.stitched.copies) & np.isfinite(tensor.want)).any())


@dataclass
class _Overflows:
    """The operations of all ranks that make NaN or infinity, in their order, each with its largest finite input."""

    largest: dict[Operation, float] = field(default_factory=dict)

    def add(self, operation: Operation, result: Any, made: Tensor, largest: float) -> Any:
        self.largest[operation] = max(largest, self.largest.get(operation, 0.0))
        return result

    def text(self, operation: Operation) -> str:
        largest = self.largest[operation]
        return f", of numbers up to {number_text(largest)}" if largest else ""


class _Watcher(Mode):
    """Passes results through `seen` that have NaN from inputs without NaN, or infinity from finite inputs.

    `seen(operation, result, elements, largest)` returns a replacement; `largest` is the largest finite input.
    """

    def __init__(self, seen: Callable[[Operation, Any, Tensor, float], Any], mesh: Any) -> None:
        super().__init__()
        self._seen = seen

    def run(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        has_nan = any(bool(x.isnan().any()) for x in given)
        is_finite = all(bool(x.isfinite().all()) for x in given)
        largest = max((float(x[x.isfinite()].abs().max()) for x in given if x.isfinite().any()), default=0.0)
        result = func(*args, **kwargs)
        value = value_of(result)
        if has_nan or not operation.source or operation.name in FILLS or not given or value is None:
            return result
        made = value.isnan() | (value.isinf() if is_finite else torch.zeros_like(value, dtype=torch.bool))
        return self._seen(operation.of_line, result, made, largest) if bool(made.any()) else result


def _with_ones(target: Operation, operation: Operation, result: Any, made: Tensor, largest: float) -> Any:
    """The result; if the operation is the target, with 1 at the elements `made`."""
    value = value_of(result)
    if operation != target or value is None:
        return result
    if operation.name.endswith("_"):
        return result.masked_fill_(made, 1.0)
    mended = value.masked_fill(made, 1.0)
    return mended if value is result else type(result)((mended, *result[1:]))
