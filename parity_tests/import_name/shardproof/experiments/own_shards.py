"""Whether each rank computes the reference of its own shard: a norm, a softmax, a top-k or a count that is not global.

A function of rows is right on a shard of rows, and a function along a dim is wrong on a shard of that dim, by whatever
amount the values give. So the reference is evaluated on one rank's inputs alone, and compared with that rank's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared, nested, outputs_by_name, takes_mesh
from shardproof.draw import inputs
from shardproof.engines.engines import run
from shardproof.engines.program import Program, RankResult
from shardproof.explain.arithmetic import ADDED_BEFORE, names_a_number
from shardproof.explain.note import OBSERVED, Note
from shardproof.explain.places import NO_PATTERN, SAME_VALUES
from shardproof.judge import bridge
from shardproof.judge.compare import TensorComparison, compare
from shardproof.judge.reference import evaluate, evaluated
from shardproof.report.report import Report

OWN = "each rank computes the reference of its own shard"
ADDED = "the ranks' references of their own shards are added up, as where a root or a local mean comes before the sum"
AVERAGED = "the ranks' references of their own shards are averaged, as where a mean divides by a local count"
SIDE_BY_SIDE = "the ranks' references of their own shards stand side by side along "  # a dim
Notes = Mapping[str, tuple[Note, ...]]


def name_own_shards(scheme: Declared, report: Report, failing: Sequence[Report], notes: Notes) -> dict[str, Any]:
    """The notes, with one on each tensor that follows from the reference of each rank's own shard.

    It must hold in this case and in a larger one on its mesh. It comes before notes on numbers and places, which follow
    from it, and after those that name a sum or a factor. Cost: two runs of the function, and the reference on each
    rank's shapes.
    """
    by_label = dict(notes)
    if report.case.world == 1 or scheme.module:
        return by_label
    larger = next((other for other in failing if other.case.mesh == report.case.mesh), None)
    if all(tensor.ok for tensor in report.tensors if tensor.role == "output"):
        return by_label  # gradients alone lack a sum
    words_of_larger = {} if larger is None else _words(scheme, larger)
    for label, words in _words(scheme, report).items():
        judged = [report] if larger is None or label not in larger.notes else [report, larger]
        if label not in notes or _is_zero(judged, label):  # which says less than that it is zero
            continue
        common = [each for each in words if len(judged) == 1 or each in words_of_larger.get(label, ())]
        if common:
            rest = [other for other in notes[label] if not other.startswith(NO_PATTERN)]
            strong = [other for other in rest if names_a_number(other)]
            if common[0] != OWN and any(ADDED_BEFORE in other for other in strong):
                continue  # the term that is added on every rank says more
            if common[0].startswith(SIDE_BY_SIDE) and any(other.startswith(SAME_VALUES) for other in rest):
                continue  # the layout that is not undone says more
            by_label[label] = (*strong, Note(common[0], OBSERVED), *(other for other in rest if other not in strong))
    return by_label


def is_of_own_shards(note: str) -> bool:
    """Whether a note says how a tensor follows from the references of the ranks' own shards."""
    return note.startswith((OWN, ADDED, AVERAGED, SIDE_BY_SIDE))


def _is_zero(reports: Sequence[Report], label: str) -> bool:
    """Whether a tensor is zero in all of these cases."""
    return not any(tensor.got.any() for report in reports for tensor in report.tensors if tensor.label == label)


def _words(scheme: Declared, report: Report) -> dict[str, list[str]]:
    """For each wrong tensor, how it follows from the reference of each rank's inputs alone; empty if it does not."""
    case, program = report.case, Program.of(scheme)
    sharded = {axis for arg in scheme.inputs for axis in arg.spec.axes}
    places = [(rank, at) for rank, at in enumerate(inputs.coordinates(case.mesh)) if _is_first(at, sharded)]
    if len(places) == 1:
        return {}
    try:
        results = run(program, case, case.engine).results
        repeated = {each.label: each for each in compare(scheme, case, results, evaluate(scheme, program, case))}
        own = [_of_rank(scheme, program, case, at) for _, at in places]
    except Exception:  # a reference may reject the sizes or the values of a shard with any exception
        return {}
    by_label = {}
    for tensor in (tensor for tensor in report.tensors if not tensor.ok):
        if not np.array_equal(repeated[tensor.label].got, tensor.got, equal_nan=True):
            continue  # the report is of given arrays, or the function keeps state
        name = tensor.name if tensor.role == "output" else f"d/d {tensor.name}"
        triples = [
            (at, value, each[name])
            for (rank, at), each in zip(places, own, strict=True)
            if name in each and (value := _result(results[rank], tensor)) is not None
        ]
        if len(triples) == len(places):
            by_label[tensor.label] = list(_fitting(scheme, case, tensor, triples))
    return by_label


def _is_first(at: Mapping[str, int], sharded: set[str]) -> bool:
    """Whether a rank is the first of those with the same shards."""
    return not any(place for axis, place in at.items() if axis not in sharded)


def _result(result: RankResult, tensor: TensorComparison) -> np.ndarray | None:
    return result.outputs[tensor.name] if tensor.role == "output" else result.gradients[tensor.name]


def _fitting(
    scheme: Declared,
    case: CaseSpec,
    tensor: TensorComparison,
    triples: Sequence[tuple[Mapping[str, int], np.ndarray, np.ndarray]],
) -> Iterator[str]:
    """The sentences that fit all ranks; each of `triples` is a rank's place, its result, and its own shard's result."""
    count = len(triples)
    if all(_agrees(scheme, case, at, tensor, got, own) for at, got, own in triples):
        yield OWN
        if tensor.role == "gradient":  # a sum has the gradients of its terms
            yield ADDED
    if tensor.role == "gradient":
        if all(_agrees(scheme, case, at, tensor, got * count, own) for at, got, own in triples):
            yield AVERAGED
    elif not tensor.argument.spec.axes:
        at, total = triples[0][0], np.sum([own for _, _, own in triples], axis=0)
        if _agrees(scheme, case, at, tensor, tensor.got, total):
            yield ADDED
        if _agrees(scheme, case, at, tensor, tensor.got * count, total):
            yield AVERAGED
        dim = _dim_of_parts(tensor.got, [own for _, _, own in triples])
        if dim is not None:
            joined = np.concatenate([own for _, _, own in triples], dim)
            if _agrees(scheme, case, at, tensor, tensor.got, joined):
                yield f"{SIDE_BY_SIDE}{tensor.argument.spec.dims[dim].name or f'dim {dim}'}"


def _dim_of_parts(whole: np.ndarray, parts: Sequence[np.ndarray]) -> int | None:
    """The dim along which the parts may make up a tensor: their only dim of another length than the tensor's."""
    first = parts[0]
    dims = [dim for dim in range(whole.ndim) if first.ndim == whole.ndim and first.shape[dim] != whole.shape[dim]]
    if len(dims) != 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return None
    others = {tuple(np.delete(each.shape, dims)) for each in (whole, *parts)}
    return dims[0] if len(others) == 1 else None


def _of_rank(scheme: Declared, program: Program, case: CaseSpec, at: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Outputs and gradients, by label, of the reference on the inputs and the cotangents of one rank."""
    import jax

    options = {name: case.options[name] for name in scheme.options if name in case.options}
    if takes_mesh(scheme.reference):
        options["mesh"] = dict.fromkeys(scheme.mesh, 1)
    arrays = {arg.name: _input(scheme, program, arg, case, at) for arg in scheme.inputs}
    active = {arg.name: arrays[arg.name] for arg in scheme.inputs if arg.differentiable}
    names = [arg.name for arg in scheme.outputs]
    smooth = [arg for arg in scheme.outputs if arg.differentiable and not arg.modified]
    cotangents = {arg.name: _cotangent(scheme, program, arg, case, at) for arg in smooth}

    def values(own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        returned = bridge.call_reference(scheme.reference, **nested({**arrays, **own}), **options)
        outputs = outputs_by_name(returned, names, scheme.output_form)
        return {name: outputs[name] for name in cotangents}, outputs

    def both(own: Mapping[str, Any], c: Mapping[str, Any]) -> Any:
        smooth, pullback, outputs = jax.vjp(values, own, has_aux=True)
        if any(smooth[name].shape != each.shape for name, each in c.items()):
            return outputs, {}  # a gathered output has no cotangent for the rank's part alone
        return outputs, pullback(c)[0]

    with jax.numpy_dtype_promotion("standard"):  # integers become floats; narrow floats were rejected before
        outputs, gradients = evaluated(both)(active, cotangents)
    return {**outputs, **{f"d/d {name}": gradient for name, gradient in gradients.items()}}


def _input(scheme: Declared, program: Program, arg: Argument, case: CaseSpec, at: Mapping[str, int]) -> Any:
    import jax.numpy as jnp

    if arg.is_integer:
        return jnp.asarray(inputs.piece(arg, program.full_array(arg, case), case, at, scheme.layouts))
    addend = inputs.addend_of_rank(arg, program.addends(arg, case, "input"), case, at, role="input")
    return inputs.piece(arg, addend, case, at, scheme.layouts)


def _cotangent(scheme: Declared, program: Program, arg: Argument, case: CaseSpec, at: Mapping[str, int]) -> np.ndarray:
    addend = inputs.addend_of_rank(arg, program.addends(arg, case, "cotangent"), case, at, role="cotangent")
    return inputs.piece(arg, addend, case, at, scheme.layouts)


def _agrees(
    scheme: Declared, case: CaseSpec, at: Mapping[str, int], tensor: TensorComparison, got: np.ndarray, want: np.ndarray
) -> bool:
    """Whether a rank's numbers are within the budgets of its part of a tensor, which grow with larger numbers.

    An element may be larger than the tensor's, as where a product starts again: then the usual relative budget counts.
    """
    if got.shape != want.shape or not np.isfinite(want).all():
        return False
    budgets = inputs.piece(tensor.argument, tensor.element_budgets, case, at, scheme.layouts)
    of_global = inputs.piece(tensor.argument, np.abs(tensor.want), case, at, scheme.layouts)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        growth = max(1.0, np.abs(want).max(initial=0.0) / max(of_global.max(initial=0.0), np.finfo(float).tiny))
        relative = np.median((budgets / of_global)[of_global > 0]) if of_global.any() else 0.0
        return bool((np.abs(got - want) <= np.maximum(budgets * growth, relative * np.abs(want))).all())
