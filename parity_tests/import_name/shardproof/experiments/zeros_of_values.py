"""A tensor that is zero because of the values that were drawn: a product of tiny numbers is 0, and so is a derivative.

That nothing reaches such a tensor is refuted by the same case with normal values, where it is right.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.declare.declared import Declared
from shardproof.experiments import cases
from shardproof.explain.arithmetic import IS_ZERO
from shardproof.explain.note import OBSERVED, Note
from shardproof.report.report import Report

RIGHT_WITH_NORMAL = "right with normal values"
Notes = Mapping[str, tuple[Note, ...]]


def name_zeros_of_values(scheme: Declared, report: Report, notes: Notes) -> dict[str, tuple[Note, ...]]:
    """The notes; one on zeros names the values where the tensor is right with normal ones. Cost: one run."""
    by_label = dict(notes)
    zeros = [label for label, of_tensor in notes.items() if any(IS_ZERO in note for note in of_tensor)]
    normal = cases.normal_values(scheme, report.case)
    special = [name for name, value in report.case.values.items() if value != normal[name]]
    if not zeros or not special:
        return by_label
    with_normal = next(cases.reports(scheme, [report.case.replace(values=normal)]), None)
    right = with_normal.tensors if with_normal is not None and with_normal.failure is None else ()
    drawn = " and ".join(f"{name} {report.case.values[name]['kind']}" for name in special)
    for tensor in right:
        if tensor.label in zeros and tensor.ok and tensor.want.any():
            text = f"{RIGHT_WITH_NORMAL}; {tensor.role}{IS_ZERO.rstrip(': ')} with {drawn}"
            rest = (note for note in by_label[tensor.label] if IS_ZERO not in note)
            by_label[tensor.label] = (Note(text, OBSERVED), *rest)
    return by_label
