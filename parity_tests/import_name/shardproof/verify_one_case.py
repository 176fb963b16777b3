"""Verify one case: evaluate the reference, run the ranks, apply the four oracles, and add notes on wrong tensors.

An oracle, as in papers on testing, decides whether a run was right. The four are value (outputs and gradients against
the reference), protocol (the ranks' collectives fit together), cost (calls and bytes are as declared) and hygiene (no
input was modified, replicas are bitwise equal, the random state is unchanged, a function inside a larger world did not
use the default group).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardproof.declare import conditions
from shardproof.declare.case import CaseSpec
from shardproof.declare.declaration_failure import DeclarationFailure
from shardproof.draw import inputs, unread_rows
from shardproof.engines.engines import run
from shardproof.engines.failure import Raised, RankFailure
from shardproof.engines.ledger import Finding, Ledger, RunResult, base
from shardproof.engines.modes import outside_modes
from shardproof.engines.program import Program
from shardproof.explain.clues import explain
from shardproof.explain.collect_evidence import collect_evidence
from shardproof.explain.note import Note
from shardproof.judge import compare, own_functions, side_checks
from shardproof.judge.reference import Reference, check_repeats, evaluate, undefined_gradients
from shardproof.report.report import Report

if TYPE_CHECKING:
    from shardproof.declare.declared import Declared
    from shardproof.engines.program import RankResult

NARROW = ("bfloat16", "float16")
SHOWN_INTEGERS = 16  # elements of an integer input that a report shows
MORE_ROUNDINGS = (2, 4)  # times the declared roundings: stored intermediates cause no larger errors


@outside_modes()
def verify_case(
    scheme: Declared,
    case: CaseSpec,
    *,
    quiet_s: float | None = None,
    reference: Reference | None = None,
    wrap_program: Callable[[Program], Callable[..., Any]] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
    cotangents: Mapping[str, np.ndarray] | None = None,
) -> Report:
    """Verify one case and return its report. The case is not shrunk, and notes are not tested on other cases.

    `arrays` (full inputs by name) and `cotangents` (by output) replace the drawn ones. `reference` is an already
    evaluated reference; `wrap_program` wraps the function that each rank runs. A failed rank is reported, not raised.

    Errors: ReferenceFailure if the reference cannot be evaluated; DeclarationFailure for a custom layout that is not a
    partition or cannot shard a size of the case, and for a cost that raises.
    """
    # 1. Custom layouts must be partitions before they shard anything.
    _check_custom_layouts(scheme, case)
    # 2. Evaluate the reference on one device, run the program on every rank.
    program = Program.of(scheme, arrays=arrays, cotangents=cotangents)
    source = _source(scheme, program, case)
    reference = reference or evaluate(scheme, program, case)
    try:
        ranks = run(wrap_program(program) if wrap_program else program, case, case.engine, quiet_s=quiet_s)
    except RankFailure as failure:
        return _failed(scheme, program, case, failure, source)
    # 3. Compare values and gradients, then the ledgers.
    own_functions.check()
    tensors = compare.compare(scheme, case, ranks.results, reference)
    if not all(tensor.ok for tensor in tensors if tensor.role == "gradient"):
        undefined = undefined_gradients(scheme, program, case, reference)
        tensors = compare.compare(scheme, case, ranks.results, reference, undefined)
    declared = side_checks.declared_costs(scheme, case, program)
    # 4. Explain each wrong tensor. The reference must return equal values when it is evaluated again.
    if arrays is None and not all(tensor.ok for tensor in tensors):
        check_repeats(scheme, program, case, reference)
    notes = _notes(scheme, program, case, ranks, tensors)
    return Report(
        scheme.key,
        case,
        tensors=tuple(tensors),
        protocol=_protocol(scheme, case, ranks.ledger, tensors),
        cost=side_checks.cost(case, ranks.ledger, declared),
        hygiene=side_checks.hygiene(scheme, case, ranks.results, tensors, ranks.ledger),
        notes=notes,
        ledger=ranks.ledger,
        cost_declared=scheme.cost is not None,
        declared_costs=declared,
        seconds=ranks.seconds,
        **source,
    )


def of_failed_rank(scheme: Declared, case: CaseSpec, failure: RankFailure) -> Report:
    """The report of a case in which a rank failed and may have ended its process."""
    program = Program.of(scheme)
    return _failed(scheme, program, case, failure, _source(scheme, program, case))


def _failed(
    scheme: Declared, program: Program, case: CaseSpec, failure: RankFailure, source: Mapping[str, Any]
) -> Report:
    return Report(
        scheme.key,
        case,
        failure=failure,
        ledger=failure.ledger or Ledger(),
        shards=_shards(scheme, program, case, failure.rank) if isinstance(failure, Raised) else None,
        **source,
    )


def _protocol(
    scheme: Declared, case: CaseSpec, ledger: Ledger, tensors: Sequence[compare.TensorComparison]
) -> tuple[Finding, ...]:
    # On lockstep a result is poisoned until its wait: if no tensor has a NaN, no poisoned result was read.
    is_poisoned = case.engine == "lockstep" and not any(np.isnan(tensor.got).any() for tensor in tensors)
    return side_checks.protocol(ledger, scheme.engines, poisoned=is_poisoned)


def _source(scheme: Declared, program: Program, case: CaseSpec) -> dict[str, Any]:
    """Origin of the case in a report: the implementation, the function's line, the values of scalar inputs."""
    return {
        "implementation": scheme.implementation,
        "source": f"{base(scheme.file)}:{scheme.line}",
        "excluded_conditions": scheme.excluded_conditions,
        "scalars": {arg.name: program.full_array(arg, case).item() for arg in scheme.inputs if not arg.spec.dims},
    }


def _check_custom_layouts(scheme: Declared, case: CaseSpec) -> None:
    """Check that custom layouts are partitions, in the case and in its other calls. Errors: DeclarationFailure."""
    try:
        for call in (case, *conditions.other_cases(case)):
            inputs.check_custom_layouts((*scheme.inputs, *scheme.outputs), call, scheme.layouts)
            unread_rows.check(scheme.nan_cotangents, scheme.outputs, call)
    except ValueError as error:
        raise DeclarationFailure(f"scheme '{scheme.name}': {error}") from error


def _shards(scheme: Declared, program: Program, case: CaseSpec, rank: int) -> str:
    """The shapes of a rank's inputs, to show a wrong spec: `rank 1 has x (2,4) of 'b i/tp', ids (2) of 'b' = [0, 3]`.

    Small integer inputs, such as ids and offsets, also show their values.
    """
    coords = inputs.coordinates(case.mesh)[rank]
    texts = []
    for arg in scheme.inputs:
        shape = inputs.local_shape(arg, case, coords, scheme.layouts)
        text = f"{arg.name} ({','.join(map(str, shape))}) of '{arg.spec}'"
        if arg.is_integer and arg.spec.dims and math.prod(shape) <= SHOWN_INTEGERS:
            piece = inputs.piece(arg, program.full_array(arg, case), case, coords, scheme.layouts)
            text = f"{text} = {piece.tolist()}"
        texts.append(text)
    return f"rank {rank} has {', '.join(texts)}"


def _notes(
    scheme: Declared,
    program: Program,
    case: CaseSpec,
    ranks: RunResult,
    tensors: Sequence[compare.TensorComparison],
) -> dict[str, tuple[Note, ...]]:
    """Notes on the kind of mistake, for each wrong tensor."""
    wrong = [tensor for tensor in tensors if not tensor.ok]
    outputs_pass = all(tensor.ok for tensor in tensors if tensor.role == "output")
    budgets_by_roundings = _budgets_by_roundings(scheme, program, case, ranks.results) if wrong else {}
    notes = {}
    for tensor in wrong:
        budgets_of_tensor = {count: budgets[tensor.label] for count, budgets in budgets_by_roundings.items()}
        notes[tensor.label] = explain(
            collect_evidence(scheme, program, case, tensor, outputs_pass, ranks.ledger, budgets_of_tensor)
        )
    return notes


def _budgets_by_roundings(
    scheme: Declared, program: Program, case: CaseSpec, results: Sequence[RankResult]
) -> dict[int, dict[str, np.ndarray]]:
    """Error budgets for more declared roundings, as {roundings: {tensor: budgets}}; empty for wide dtypes."""
    if case.dtype not in NARROW:
        return {}
    by_count = {}
    for count in (times * max(scheme.roundings, 1) for times in MORE_ROUNDINGS):
        more_roundings = replace(scheme, roundings=count, sums=None)
        tensors = compare.compare(more_roundings, case, results, evaluate(more_roundings, program, case))
        by_count[count] = {tensor.label: tensor.element_budgets for tensor in tensors}
    return by_count
