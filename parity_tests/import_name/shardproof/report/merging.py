"""Merge the reports of many examples into one report of their scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.judge.compare import TensorComparison
from shardproof.report.owner_map import reduced
from shardproof.report.report import Report, mesh_text

MAX_UNDECIDED_SHARE = 0.25  # a scheme passes if at most this share of its examples is undecided


def merge_reports(reports: Sequence[Report]) -> Report:
    """One report on many examples of a scheme, with the worst comparison of each tensor.

    If an example failed, it is that example's report; if all are equal, that of the last which shows most. Examples in
    which work is only never waited for count as equal, and the report is on the smallest of them.
    """
    failed = [report for report in reports if report.failed and not report.only_unwaited]
    undecided = [report for report in reports if report.is_undecided]
    unwaited = [report for report in reports if report.only_unwaited]
    equal = [report for report in reports if report.ok] + unwaited
    is_undecided = not failed and len(undecided) > MAX_UNDECIDED_SHARE * len(reports)
    shown = failed or (undecided if is_undecided else [r for r in equal if SPARE not in r.case.mesh] or equal)
    example = shown[-1] if failed or is_undecided else max(reversed(shown), key=_shows)
    if unwaited and not (failed or is_undecided):
        example = min(unwaited, key=lambda report: (report.case.world, math.prod(report.case.dims.values())))
    meshes = [example.case.mesh] if failed else [report.case.scheme_mesh for report in reports]
    worst: dict[str, tuple[TensorComparison, CaseSpec]] = {}
    for report in [example] if failed else undecided if is_undecided else equal:
        for tensor in report.tensors:
            if tensor.label not in worst or tensor.ratio >= worst[tensor.label][0].ratio:
                worst[tensor.label] = tensor, report.case
    return replace(
        example,
        tensors=tuple(tensor for tensor, _ in worst.values()),
        case_of_tensor={label: case for label, (_, case) in worst.items()},
        examples=len(reports),
        dtypes=tuple(dict.fromkeys(report.case.dtype for report in reports)),
        meshes=tuple(sorted(set(map(mesh_text, meshes)))),
        seconds=sum(report.seconds for report in reports),
        is_undecided=is_undecided,
        undecided_reason=undecided[-1].undecided_reason if undecided else None,
        undecided_examples=len(undecided),
    )


def _shows(report: Report) -> tuple[bool, bool, int, bool, int]:
    """How much of a scheme an equal case shows; the largest is drawn.

    A single rank has no collectives. A call under conditions may lack gradients, and is not the call that a reader
    expects. A map of a long case has many elements in a cell.
    """
    has_gradients = any(tensor.role == "gradient" for tensor in report.tensors)
    has_cells = all(reduced(tensor.want, first=True)[1] == 1 for tensor in report.tensors if tensor.want.size)
    return report.case.world > 1, has_gradients, -len(report.case.conditions), has_cells, report.case.world
