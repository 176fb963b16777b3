"""Inputs on which the reference's outputs depend and the function's do not: a mask or a sink that is never applied.

Such an input has no pattern in the numbers, and no edit of a line may bring it in. So a failing case runs again with
other values of the input: if no element of an output changes, nothing in it follows from the input. The values have
other sums and counts besides another order, as a function that only counts a mask does depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.declare.draws import Draw
from shardproof.draw import inputs
from shardproof.endings.raised import none_if_raised
from shardproof.engines.program import Program
from shardproof.experiments.edited_programs import wrong_outputs
from shardproof.experiments.input_edits import IN_ANY_ORDER
from shardproof.explain.note import IN_THIS_CASE, OBSERVED, Note
from shardproof.explain.places import NO_PATTERN
from shardproof.judge.compare import TensorComparison
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

UNUSED = "no output of the function depends on "
UNUSED_HERE = " of the function does not depend on "  # an output, where another one does
MOST_CASES = 3  # a case may have few elements, or all of one value
MOST_VALUES = 2  # of an input in each case
SEQUENCES = ("lengths", "offsets")
Notes = Mapping[str, tuple[Note, ...]]


def name_unused_inputs(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, Any]:
    """The notes, with the inputs that an output does not follow from, before those on places.

    Cost: up to MOST_CASES * MOST_VALUES runs for each input.
    """
    by_label = dict(notes)
    unnamed = [label for label in wrong_outputs(report) if all(map(says_a_place, notes.get(label, ())))]
    if not unnamed:
        return by_label
    clearest = sorted([report, *failing], key=lambda other: -sum(tensor.want.size for tensor in other.tensors))
    changes = [change for other in clearest[:MOST_CASES] for change in _changes(scheme, other.case)]
    used = {(name, label) for name, label, of_function, _ in changes if of_function}
    wanted = {(name, label) for name, label, _, of_reference in changes if of_reference}
    for label in unnamed:
        unused = [arg.name for arg in scheme.inputs if (arg.name, label) in wanted - used]
        if unused and len(unused) < len(scheme.inputs):  # a result that follows from nothing is wrong otherwise
            names = " and ".join(unused)
            text = f"{UNUSED}{names}, as the reference's do"
            if any(name in unused for name, _ in used):
                text = f"{label}{UNUSED_HERE}{names}, as the reference's does"
            rest = (other for other in notes[label] if not other.startswith(NO_PATTERN))
            by_label[label] = (Note(text, OBSERVED), *rest)
    return by_label


def says_a_place(note: Note) -> bool:
    return note.startswith((NO_PATTERN, "wrong only", "right only")) or f" {IN_THIS_CASE}" in note


def _changes(scheme: Declared, case: CaseSpec) -> Iterator[tuple[str, str, bool, bool]]:
    """For each input and output, whether other values change the function's output, and the reference's."""
    program = Program.of(scheme)
    arrays = {arg.name: program.full_array(arg, case) for arg in scheme.inputs}
    outputs = none_if_raised(partial(_outputs, scheme, case))  # a reference may reject other values
    before = outputs(arrays)
    if before is None:
        return
    for arg in scheme.inputs:
        for changed in islice(_other_values(scheme, arg, case, arrays[arg.name]), MOST_VALUES):
            after = outputs({**arrays, arg.name: changed})
            if after is None:
                continue
            for label, old in before.items():
                if label not in after:  # the function raises, which follows from the input
                    yield arg.name, label, True, False
                    continue
                new = after[label]
                of_function = not np.array_equal(old.got, new.got, equal_nan=True)
                with np.errstate(invalid="ignore"):  # equal infinities are no change
                    of_reference = bool((np.abs(old.want - new.want) > old.element_budgets).any())
                yield arg.name, label, of_function, of_reference


def _outputs(scheme: Declared, case: CaseSpec, arrays: Mapping[str, np.ndarray]) -> dict[str, TensorComparison]:
    tensors = verify_case(scheme, case, arrays=arrays).tensors
    return {tensor.label: tensor for tensor in tensors if tensor.role == "output"}


def _other_values(scheme: Declared, arg: Argument, case: CaseSpec, x: np.ndarray) -> Iterator[np.ndarray]:
    """Other valid values of an input: drawn anew, the same in another order, a single number twice as large."""
    draw = scheme.draws[arg.name]
    if arg.modified or arg.name in case.conditions.get("same_tensor", ()):
        return
    if draw.kind in SEQUENCES:
        candidates = _other_sequences(scheme, draw, x)
    else:
        candidates = [none_if_raised(_drawn_anew)(arg, draw, case)]
        if draw.kind in IN_ANY_ORDER:
            candidates += [np.flip(x), np.roll(x, 1), *([] if x.size > 1 or arg.is_integer else [2.0 * x])]
    for other in candidates:
        if other is not None and not np.array_equal(other, x, equal_nan=not arg.is_integer):
            yield other


def _drawn_anew(arg: Argument, draw: Draw, case: CaseSpec) -> np.ndarray:
    """The input from another seed, a mask with other elements of about half, ids of any shard."""
    value = case.values.get(arg.name, {})
    looser = {"mask": {"keep": "half"}, "ids": {"picks": [[0, "anywhere"]]}}.get(draw.kind, {})
    other = case.replace(seed=case.seed + 1, values={**case.values, arg.name: {**value, **looser}})
    return inputs.full_array(arg, draw, other)


def _other_sequences(scheme: Declared, draw: Draw, x: np.ndarray) -> list[np.ndarray]:
    """Other lengths of as many sequences with the same sum, if no layout and no other input has them."""
    layouts = [
        s.layout for arg in scheme.inputs for dim in arg.spec.dims if dim.name == draw.dim for s in dim.shardings
    ]
    others = [other for other in scheme.draws.values() if other.kind in SEQUENCES and other.dim == draw.dim]
    if draw.padded or "packed" in layouts or len(others) > 1:
        return []
    lengths = x if draw.kind == "lengths" else np.diff(x)
    least = np.full_like(lengths, 0 if draw.empty else 1)
    least[-1:] += lengths.sum() - least.sum()
    changed = (least, np.flip(lengths))
    return list(changed) if draw.kind == "lengths" else [np.concatenate([[0], np.cumsum(each)]) for each in changed]
