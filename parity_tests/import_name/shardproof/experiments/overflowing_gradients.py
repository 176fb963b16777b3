"""Name the operation whose backward first makes NaN or infinity, if a gradient is not finite but the reference's is.

The derivative of a root is infinite at 0, and 0 times infinity is NaN: the outputs are finite, and the place in the
gradient says little. A note names an operation whose backward turns finite numbers into infinity, or numbers into NaN,
if every gradient is finite once it returns 1 there. In a hand-written backward it names the operation inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.declare.declared import Declared
from shardproof.experiments.combined_operations import Operation
from shardproof.experiments.edited_programs import in_backwards
from shardproof.experiments.first_overflow import (
    FIRST_MADE_BY,
    MOST_OPERATIONS,
    Numbers,
    Overflows,
    Seen,
    Watcher,
    is_unexpected,
    with_ones,
)
from shardproof.experiments.unsummed_edges import Graph, with_graph
from shardproof.explain.note import READ_TOO_EARLY, Note
from shardproof.explain.places import NOT_FINITE
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

Notes = Mapping[str, tuple[Note, ...]]


def name_overflowing_gradients(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes, with the operation whose backward first makes the NaN or the infinity of a gradient.

    Cost: up to 2 + 2 * MOST_OPERATIONS runs of the case.
    """
    by_label = dict(notes)
    unnamed = [
        tensor.label
        for tensor in report.tensors
        if tensor.role == "gradient" and any(map(_is_unnamed, notes.get(tensor.label, ())))
    ]
    if not unnamed or any(is_unexpected(tensor) for tensor in report.tensors if tensor.role == "output"):
        return by_label
    words = _handwritten_words(scheme, report) or _autograd_words(scheme, report)
    for label in unnamed if words else []:
        by_label[label] = tuple(note.extended(words) if _is_unnamed(note) else note for note in by_label[label])
    return by_label


def _is_unnamed(note: Note) -> bool:
    return note.startswith(NOT_FINITE) and READ_TOO_EARLY not in note and FIRST_MADE_BY not in note


def _handwritten_words(scheme: Declared, report: Report) -> str:
    """The words on an operation inside a hand-written backward; empty if none is to blame."""
    found = Overflows()
    verify_case(scheme, report.case, wrap_program=in_backwards(partial(Watcher, found.add)))
    for operation in list(found.largest)[:MOST_OPERATIONS]:
        wrap = in_backwards(partial(Watcher, partial(with_ones, operation)))
        if _is_mended(verify_case(scheme, report.case, wrap_program=wrap)):
            return f"; {FIRST_MADE_BY}{operation.name} at {operation.source}{found.text(operation)}"
    return ""


def _autograd_words(scheme: Declared, report: Report) -> str:
    """The words on an operation whose backward is torch's own, by the line that calls it."""
    found = Overflows()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):  # which keeps the line of each operation
        verify_case(scheme, report.case, wrap_program=_watched(found.add))
        for operation in list(found.largest)[:MOST_OPERATIONS]:
            wrap = _watched(partial(with_ones, operation))
            if _is_mended(verify_case(scheme, report.case, wrap_program=wrap)):
                return f"; {FIRST_MADE_BY}the backward of {operation.name} at {operation.source}"
    return ""


def _is_mended(report: Report) -> bool:
    return report.failure is None and not any(map(is_unexpected, report.tensors))


def _watched(seen: Seen) -> Callable[[Any], Any]:
    """A wrapper that passes gradients through `seen`, as `Watcher` does with results."""

    def add_hooks(mesh: Any, graph: Graph) -> None:
        for node, edge in {node: edge for edge, node, _ in graph if not edge.is_handwritten}.items():
            node.register_hook(partial(_checked, seen, Operation(edge.operation, edge.source)))

    return with_graph(add_hooks)


def _checked(
    seen: Seen,
    operation: Operation,
    gradients: Sequence[Any],
    cotangents: Sequence[Any],
) -> tuple[Any, ...]:
    given = [x for x in cotangents if type(x) is Tensor]
    if not given:  # a DTensor, or no cotangent
        return tuple(gradients)
    numbers = Numbers.of(given)

    def passed(gradient: Any) -> Any:
        is_watched = type(gradient) is Tensor and not bool(gradient.isfinite().all())
        return seen(operation, gradient, numbers) if is_watched else gradient

    return tuple(map(passed, gradients))
