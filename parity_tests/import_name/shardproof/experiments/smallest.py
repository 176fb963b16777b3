"""The smallest case: shrink one size at a time, beyond the few drawn shapes, until no smaller case fails.

Hypothesis shrinks a failure to the simplest of the drawn shapes, which are few because a reference is traced once per
shape. Another shape may be much smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from shardproof.declare.case import SPARE, CaseSpec
from shardproof.declare.conditions import OTHER_CALLS, other_cases, record_of, with_one_less
from shardproof.declare.declared import Declared
from shardproof.declare.dim_formulas import complete_dims
from shardproof.declare.draws import shard_borders
from shardproof.draw import size_choices
from shardproof.draw.choosers import simplest
from shardproof.draw.drawing import another, draw_case, sequence_count
from shardproof.endings.raised import none_if_raised
from shardproof.engines.failure import CollectiveMismatch, RankFailure, Stalled
from shardproof.experiments.undecided import verify_or_undecided
from shardproof.judge.side_checks import unequal_replicas
from shardproof.report.report import Report

MAX_RUNS = 40
# None where a draw, the reference or the cost raises: sizes that are never drawn need not be supported.
_tried = none_if_raised(verify_or_undecided)


def shrink(scheme: Declared, report: Report, fixed: Mapping[str, Any]) -> Report:
    """The report of the smallest case found with the same failure; `fixed` sizes are kept.

    Its `smallest` is True if every other size was tried one step smaller and no such case fails this way; it is False
    if MAX_RUNS runs were not enough, or if all sizes are fixed. Its `as_given` lists the fixed sizes that could be
    smaller.
    """
    if isinstance(report.failure, Stalled):  # each run would be as slow
        return report
    if report.case.engine != "lockstep":
        return with_fewest_conditions(scheme, report)
    smallest = _of_smallest_sizes(scheme, with_fewest_conditions(scheme, report), fixed)
    # A smaller case may need one condition less.
    sizes, smaller_sizes = ((case.dims, case.mesh) for case in (report.case, smallest.case))
    return with_fewest_conditions(scheme, smallest) if smaller_sizes != sizes else smallest


def with_fewest_conditions(scheme: Declared, report: Report) -> Report:
    """The report of the case without the calling conditions that the failure does not need.

    If a rank fails in the call before or between, that call may be the case itself.
    """
    companions = other_cases(report.case) if report.failure is not None else []
    for case in (*companions, *with_one_less(report.case)):
        other = _tried(scheme, case)
        if other is not None and fails_alike(other, report):
            return with_fewest_conditions(scheme, replace(other, smallest=report.smallest, as_given=report.as_given))
    return replace(report, conditions_needed=bool(report.case.conditions))


def _of_smallest_sizes(scheme: Declared, report: Report, fixed: Mapping[str, Any]) -> Report:
    runs = 0
    while True:
        for case in filter(None, _smaller(scheme, report.case, fixed)):
            if runs == MAX_RUNS:
                return report
            runs += 1
            other = _tried(scheme, case)
            if other is not None and fails_alike(other, report):
                report = replace(other, smallest=False, conditions_needed=report.conditions_needed)
                break
        else:
            as_given = _given_above_least(scheme, report.case, fixed)
            return replace(report, smallest=not _all_are_fixed(scheme, fixed), as_given=as_given)


def _all_are_fixed(scheme: Declared, fixed: Mapping[str, Any]) -> bool:
    """Whether every free size is fixed."""
    axes = [axis for axis, choices in scheme.mesh.items() if len(choices) > 1]
    return all(name in fixed for name in (*axes, *size_choices.free_dims(scheme)))


def _given_above_least(scheme: Declared, case: CaseSpec, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    """The fixed axes and dims for which the declaration has a smaller size."""
    axes = [axis for axis, choices in scheme.mesh.items() if min(choices) < case.mesh[axis]]
    dims = [dim for dim in size_choices.free_dims(scheme) if any(_fitting_sizes(scheme, case, dim))]
    return tuple(name for name in (*axes, *dims) if name in fixed)


def fails_alike(report: Report, other: Report) -> bool:
    """The same oracle, and a tensor in common, an output if one is wrong; for a failed rank, the same cause and line.

    A tensor that is not finite is no smaller case of a finite one: there the reference may have no value.
    A mismatch matches a hygiene failure only if the same replicas differ: infinities hide the wrong values.
    """
    if not report.ok and report.verdict == "mismatch" and other.verdict == "hygiene":
        return bool(unequal_replicas(report.hygiene) & unequal_replicas(other.hygiene))
    if report.ok or report.verdict != other.verdict:
        return False
    if report.failure is not None and other.failure is not None:
        return _places(report.failure) == _places(other.failure)
    wrong = _wrong_labels(report) - (_not_finite(report) - _not_finite(other))
    wrong_outputs, wrong_tensors = _wrong_labels(other, "output"), _wrong_labels(other)
    return bool(wrong & (wrong_outputs or wrong_tensors)) if wrong_tensors else not _wrong_labels(report)


def _not_finite(report: Report) -> set[str]:
    """The wrong tensors that are not finite where the reference is."""
    wrong = (tensor for tensor in report.tensors if not tensor.ok)
    return {tensor.label for tensor in wrong if not np.isfinite(tensor.got[np.isfinite(tensor.want)]).all()}


def _places(failure: RankFailure) -> set[str]:
    """The operation and line of a failed rank; for calls that do not fit together, of all of them, in any order."""
    if isinstance(failure, CollectiveMismatch):
        return set(re.findall(r"\w+(?= [\w.]+\[)|(?<= at )[^ ;]+:\d+", str(failure.args[0])))
    return {f"{failure.op} {failure.source}"}


def _wrong_labels(report: Report, role: str | None = None) -> set[str]:
    return {tensor.label for tensor in report.tensors if not tensor.ok and role in (None, tensor.role)}


def _smaller(scheme: Declared, case: CaseSpec, fixed: Mapping[str, Any]) -> Iterator[CaseSpec | None]:
    """Cases in a smaller world or with one size smaller; for each size, the smallest first and one step last.

    None for sizes that cannot be sharded.
    """
    if SPARE in case.mesh:
        yield case.replace(mesh=case.scheme_mesh)
    for axis, choices in scheme.mesh.items():
        for size in sorted(choice for choice in choices if axis not in fixed and choice < case.mesh[axis]):
            mesh, free = {**case.scheme_mesh, axis: size}, _free(scheme, case)
            yield _resized(scheme, case, mesh, free)
            yield _resized(scheme, case, mesh, _in_proportion(scheme, free, case.mesh[axis], size))
    for dim in size_choices.free_dims(scheme):
        for size in _smaller_sizes(scheme, case, dim) if dim not in fixed else ():
            yield _resized(scheme, case, case.scheme_mesh, {**_free(scheme, case), dim: size})


def _in_proportion(scheme: Declared, free: Mapping[str, int], ranks: int, fewer: int) -> dict[str, int]:
    """Sizes that give each of fewer ranks as much as each rank has now, if they divide evenly and are declared."""
    smaller = {dim: size // ranks * fewer if size % ranks == 0 else size for dim, size in free.items()}
    declared = {dim: _declared_sizes(scheme, dim) for dim in free}
    return {dim: size if size in (declared[dim] or (size,)) else free[dim] for dim, size in smaller.items()}


def _free(scheme: Declared, case: CaseSpec) -> dict[str, int]:
    return {dim: case.dims[dim] for dim in size_choices.free_dims(scheme)}


def _smaller_sizes(scheme: Declared, case: CaseSpec, dim: str) -> list[int]:
    """Smaller sizes of a dim: the declared ones if any, else the least, some between, and the last few."""
    fitting = list(_fitting_sizes(scheme, case, dim))
    count = len(fitting)
    if _declared_sizes(scheme, dim) is not None:
        return fitting
    return [fitting[at] for at in sorted({0, count // 4, count // 2, *range(count - 4, count)}) if 0 <= at < count]


def _fitting_sizes(scheme: Declared, case: CaseSpec, dim: str) -> Iterator[int]:
    """The smaller sizes of a dim, ascending, that the case's mesh can shard."""
    size, declared = case.dims[dim], _declared_sizes(scheme, dim)
    for smaller in range(1, size) if declared is None else declared:
        if smaller < size and _dims(scheme, {**_free(scheme, case), dim: smaller}, case.scheme_mesh) is not None:
            yield smaller


def _declared_sizes(scheme: Declared, dim: str) -> list[int] | None:
    """The declared sizes of a dim, ascending; None without a list of sizes."""
    declared = scheme.dims.get(dim)
    return None if declared is None or isinstance(declared, str) else sorted(declared)


@none_if_raised
def _dims(scheme: Declared, free: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int] | None:
    """All dims, if the mesh can shard them and `assume` allows them; it may raise for sizes that are never drawn."""
    dims = complete_dims(scheme.dims, free, mesh)
    fits = min(dims.values(), default=0) >= 0 and size_choices.compatible(scheme, dims, mesh)
    return dims if fits else None


@none_if_raised  # no declared mesh or shape has these sizes, or a draw does not take them
def _resized(scheme: Declared, case: CaseSpec, mesh: Mapping[str, int], free: Mapping[str, int]) -> CaseSpec | None:
    """The case with other sizes, if they can be sharded: its own values, seed and options, its lengths if they fit.

    Lengths of shards that no longer fit are drawn again, as simple as possible; of sequences, the borders stay.
    """
    dims = _dims(scheme, free, mesh)
    if dims is None:
        return None
    simplest_case = draw_case(
        scheme, simplest, {**mesh, **dims, **case.options}, dtype=case.dtype, engine=case.engine, seed=case.seed
    )
    layouts = {
        key: case.layouts[key] if _same_dim(key, case, simplest_case, mesh) else simplest_case.layouts[key]
        for key in simplest_case.layouts
    }
    lengths = {dim: _resized_lengths(scheme, dim, case, simplest_case, mesh) for dim in simplest_case.lengths}
    resized = simplest_case.replace(
        mesh={axis: mesh.get(axis, size) for axis, size in case.mesh.items()},
        layouts=layouts,
        lengths=lengths,
        values=_with_borders(scheme, case) if mesh != case.scheme_mesh and dims == case.dims else case.values,
        schedule=case.schedule,
    )
    return resized.replace(conditions={**case.conditions, **_resized_other_calls(scheme, case, resized)})


def _with_borders(scheme: Declared, case: CaseSpec) -> dict[str, Any]:
    """The values with the borders of the shards that ids were drawn from: on fewer ranks the ids stay the same."""
    values = dict(case.values)
    for name, draw in scheme.draws.items():
        if draw.kind == "ids" and draw.dim is not None:
            values[name] = {"borders": [list(shard) for shard in shard_borders(draw.dim, case)], **values[name]}
    return values


def _resized_other_calls(scheme: Declared, case: CaseSpec, resized: CaseSpec) -> dict[str, Any]:
    """Another call with the case's shapes takes the new shapes; one with other sizes is drawn for the new mesh."""
    records = {name: record for name, record in case.conditions.items() if name in OTHER_CALLS}
    for name, record in records.items():
        if record["dims"] == case.dims:
            records[name] = {**record, **record_of(resized), "values": record["values"], "seed": record["seed"]}
        elif resized.scheme_mesh != case.scheme_mesh:
            other = another(scheme, resized, resized.scheme_mesh, lambda options: options[-1], same_shapes=False)
            records[name] = record_of(other)
    return records


def _resized_lengths(
    scheme: Declared, dim: str, case: CaseSpec, simplest_case: CaseSpec, mesh: Mapping[str, int]
) -> Mapping[str, list[int]]:
    """The lengths of a dim's sequences if they fit; else without padding, with the borders that there is room for.

    The simplest ones if sequences would be empty that must not be.
    """
    lengths, size = case.lengths[dim], simplest_case.dims[dim]
    count, unit = sequence_count(scheme, dim, simplest_case.dims), size_choices.sequence_unit(scheme, mesh, dim)
    if mesh == case.scheme_mesh and sum(lengths["padded"]) == size and count in (None, len(lengths["padded"])):
        return lengths
    inner = [end for end in accumulate(lengths["padded"]) if 0 < end < sum(lengths["padded"])]
    borders = sorted({min(end, size - 1) // unit * unit for end in inner} - {0})
    if count is not None:
        borders = [*[0] * (count - 1 - len(borders)), *borders[: count - 1]]
    may_be_empty = all(draw.empty for draw in scheme.draws.values() if draw.dim == dim)
    if 0 in borders and not may_be_empty:
        return simplest_case.lengths[dim]
    padded = [end - start for start, end in pairwise([0, *borders, size])]
    return {"padded": padded, "real": padded}


def _same_dim(key: str, case: CaseSpec, simplest_case: CaseSpec, mesh: Mapping[str, int]) -> bool:
    """Whether the lengths of `dim/axis` still fit."""
    dim, _, axis = key.partition("/")
    same_size = case.dims.get(dim) == simplest_case.dims.get(dim)
    return same_size and mesh[axis] == case.mesh[axis] and key in case.layouts
