"""Inputs on which the reference's outputs depend and the function's do not: a mask or a sink that is never applied.

Such an input has no pattern in the numbers, and no edit of a line may bring it in. So a failing case runs again with
the input's elements in another order: if no element of any output changes, nothing that the function computes
follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.endings.raised import none_if_raised
from shardproof.engines.program import Program
from shardproof.explain.note import OBSERVED, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.judge.compare import TensorComparison
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

UNUSED = "no output of the function depends on "
MOST_CASES = 3  # a case may have few elements, or all of one value
REVERSIBLE = ("float", "ids", "mask", "integers")  # kinds of draws whose values are valid in any order
Notes = Mapping[str, tuple[Note, ...]]


def name_unused_inputs(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, Any]:
    """The notes, with the inputs that no output follows from, before those on places, on outputs without a cause.

    Cost: up to MOST_CASES runs for each input.
    """
    by_label = dict(notes)
    unnamed = [label for label in _wrong_outputs(report) if all(map(_says_a_place, notes.get(label, ())))]
    if not unnamed:
        return by_label
    clearest = sorted([report, *failing], key=lambda other: -sum(tensor.want.size for tensor in other.tensors))
    changes = [change for other in clearest[:MOST_CASES] for change in _changes(scheme, other.case)]
    used = {name for name, of_function, _ in changes if of_function}
    unused = list(dict.fromkeys(name for name, _, of_reference in changes if of_reference and name not in used))
    if unused and len(unused) < len(scheme.inputs):  # a result that follows from nothing is wrong otherwise
        note = Note(f"{UNUSED}{' and '.join(unused)}, as the reference's do", OBSERVED)
        for label in unnamed:
            by_label[label] = (note, *(other for other in notes[label] if not other.startswith(NO_PATTERN)))
    return by_label


def _says_a_place(note: Note) -> bool:
    return note.startswith((NO_PATTERN, "wrong only", "right only")) or "in this case; " in note


def _wrong_outputs(report: Report) -> list[str]:
    return [tensor.label for tensor in report.tensors if tensor.role == "output" and not tensor.ok]


def _changes(scheme: Declared, case: CaseSpec) -> Iterator[tuple[str, bool, bool]]:
    """For each input, whether other values of it change an output of the function, and one of the reference."""
    program = Program.of(scheme)
    arrays = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    outputs = none_if_raised(partial(_outputs, scheme, case))  # a reference may reject values in another order
    before = outputs(arrays)
    if before is None:
        return
    for arg in scheme.inputs:
        changed = _changed(scheme, arg, arrays[arg.name])
        after = None if changed is None else outputs({**arrays, arg.name: changed})
        if after is None:
            continue
        pairs = [(before[label], after[label]) for label in before.keys() & after.keys()]
        if pairs:
            of_function = not all(np.array_equal(old.got, new.got, equal_nan=True) for old, new in pairs)
            with np.errstate(invalid="ignore"):  # equal infinities are no change
                of_reference = any((np.abs(old.want - new.want) > old.element_budgets).any() for old, new in pairs)
            yield arg.name, of_function, of_reference


def _outputs(scheme: Declared, case: CaseSpec, arrays: Mapping[str, np.ndarray]) -> dict[str, TensorComparison]:
    tensors = verify_case(scheme, case, arrays=arrays).tensors
    return {tensor.label: tensor for tensor in tensors if tensor.role == "output"}


def _changed(scheme: Declared, arg: Argument, x: np.ndarray) -> np.ndarray | None:
    """An input's values in another order, a single number twice as large; None if they are the same, or invalid."""
    if arg.modified or scheme.draws[arg.name].kind not in REVERSIBLE:
        return None
    orders = (np.flip(x), np.roll(x, 1), *([] if x.size > 1 or arg.is_integer else [2.0 * x]))
    return next((changed for changed in orders if not np.array_equal(changed, x, equal_nan=not arg.is_integer)), None)
