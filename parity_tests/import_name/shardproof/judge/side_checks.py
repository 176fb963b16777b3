"""The three oracles besides values: protocol, cost and hygiene.

The ranks' collectives fit together; calls and bytes are as declared; no input was modified, replicas are bitwise equal,
outputs have their declared dtypes, the random state is unchanged, and inside a larger world the default group was not
used. Each oracle returns its findings as sentences; an empty tuple is a pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardproof.declare.case import ENGINES, SPARE, CaseSpec
from shardproof.declare.conditions import OF_ANOTHER_COST
from shardproof.declare.counted import counted
from shardproof.declare.declaration_failure import raised_by
from shardproof.declare.declared import Cost, Declared
from shardproof.declare.declared_dtypes import declared_dtypes
from shardproof.draw import inputs
from shardproof.endings.raised import pass_interrupt
from shardproof.engines.ledger import PHASES, CallSite, Finding, Ledger, LedgerRow
from shardproof.engines.lockstep.backends import OF_GLOO
from shardproof.engines.program import Program, RankResult
from shardproof.engines.protocol import disagreement
from shardproof.engines.second_derivative import imbalance
from shardproof.judge.compare import TensorComparison, index_text
from shardproof.judge.reference import UNIT_ROUNDOFF

UNEQUAL_REPLICAS = " differs between replicas"


def protocol(ledger: Ledger, engines: Sequence[str] = ENGINES, *, poisoned: bool = False) -> tuple[Finding, ...]:
    """Ranks of a group issue the same sequence: op, dtype, shape, reduce op, root, splits; gloo and NCCL accept it.

    A call that only gloo rejects is not a finding if the scheme is not declared for gloo. A call that a rank never
    waits for is a finding. With `poisoned`, a read before the wait would have shown in the results.
    """
    difference = disagreement(ledger)
    accepted = (None,) if "gloo" in engines else (None, *OF_GLOO)
    rejections = (
        Finding(f"rank {row.rank} issued {row}: {row.rejected}", (CallSite.of(row),))
        for row in ledger.rows
        if row.rejected not in accepted
    )
    rejected, unwaited = next(rejections, None), next((row for row in ledger.rows if row.unwaited), None)
    findings = (
        None if difference is None else difference.finding,
        rejected,
        None if unwaited is None else _never_waited(unwaited, poisoned),
    )
    return tuple(filter(None, findings))


def _never_waited(row: LedgerRow, poisoned: bool) -> Finding:
    unread = f"; {'the gathered tensor' if 'gather' in row.op else 'its result'} is never read"
    return Finding(
        f"rank {row.rank} returned and never waited for {row}{unread if poisoned and row.bytes_out else ''}",
        (CallSite.of(row),),
    )


def costs_of_ranks(scheme: Declared, case: CaseSpec, program: Program) -> list[Cost]:
    """The declared cost of each rank of the case; in a larger world, the cost of its place in the scheme's mesh.

    Errors: DeclarationFailure if the declared cost raises.
    """
    assert scheme.cost is not None
    # A cost that depends on values, such as offsets, takes unsharded inputs by name.
    names = list(inspect.signature(scheme.cost).parameters)[1:]
    try:
        declared = scheme.cost(case, **{a.name: program.full_array(a, case) for a in scheme.inputs if a.name in names})
        if isinstance(declared, Cost):
            return [declared] * case.world
        return [declared[_place(scheme, case, rank)] for rank in range(case.world)]
    except BaseException as error:
        pass_interrupt(error)
        raise raised_by(f"scheme '{scheme.name}': its cost", error) from error


def _place(scheme: Declared, case: CaseSpec, rank: int) -> int:
    """The rank on the scheme's own mesh, which may be part of a larger world."""
    coordinates, place = inputs.coordinates(case.mesh)[rank], 0
    for axis in scheme.mesh:
        place = place * case.mesh[axis] + coordinates[axis]
    return place


def declared_costs(scheme: Declared, case: CaseSpec, program: Program) -> tuple[Cost, ...]:
    """The declared cost of each rank; empty if none is declared, or under calling conditions that change it.

    Errors: DeclarationFailure if the declared cost raises.
    """
    if scheme.cost is None or set(OF_ANOTHER_COST) & set(case.conditions):
        return ()
    return tuple(costs_of_ranks(scheme, case, program))


def cost(case: CaseSpec, ledger: Ledger, declared: Sequence[Cost]) -> tuple[str, ...]:
    """Calls and bytes per op and phase equal the declared closed form, on every rank."""
    sentences = []
    for phase, short in PHASES.items():
        for rank, rank_cost in enumerate(declared):
            sentences += _differences(phase, rank_cost.totals(phase), ledger.cost(rank, short), rank)
            # If each axis is declared, each of its groups sends its own share of the total.
            measured: Sums = {}
            for row in (row for row in ledger.of(rank) if row.phase == short):
                key = f"{row.op} over ranks {','.join(map(str, row.group))}"
                calls, size = measured.get(key, (0, 0))
                measured[key] = (calls + 1, size + row.payload)
            for op, expected in _by_group(rank_cost, phase, case, rank).items():
                issued = {key: value for key, value in measured.items() if key.startswith(f"{op} over")}
                sentences += _differences(phase, expected, issued, rank)
    return tuple(sentences[:1])


Sums = dict[str, tuple[int, int]]  # calls and bytes


def _differences(phase: str, expected: Sums, measured: Sums, rank: int) -> list[str]:
    return [
        f"{phase} {key}: declared {counted(want[0], 'call')} of {counted(want[1], 'byte')}, "
        f"rank {rank} issued {got[0]} of {got[1]}"
        for key in sorted({*expected, *measured})
        if (want := tuple(expected.get(key, (0, 0)))) != (got := measured.get(key, (0, 0)))
    ]


def _by_group(declared: Cost, phase: str, case: CaseSpec, rank: int) -> dict[str, Sums]:
    """Calls and bytes of one rank in each of its groups, for ops that are declared with axes.

    Errors: ValueError for an axis that the mesh lacks.
    """
    by_axis = declared.by_axis(phase)
    without_axis = {op for op, axis in by_axis if axis is None}
    axes, sizes = list(case.mesh), tuple(case.mesh.values())
    ranks = np.arange(case.world).reshape(sizes)
    by_op: dict[str, Sums] = {}
    for (op, axis), (calls, size) in by_axis.items():
        if op in without_axis:
            continue
        if axis not in axes:
            raise ValueError(f"cost of {case.scheme} names {op}/{axis}; the axes are {', '.join(axes)}")
        place: list[Any] = list(np.unravel_index(rank, sizes))
        place[axes.index(axis)] = slice(None)
        key = f"{op} over ranks {','.join(map(str, ranks[tuple(place)]))}"
        sums = by_op.setdefault(op, {})
        before = sums.get(key, (0, 0))  # groups of one rank are the same for several axes
        sums[key] = (before[0] + calls, before[1] + size)
    return by_op


def hygiene(
    scheme: Declared, case: CaseSpec, results: Sequence[RankResult], tensors: Sequence[TensorComparison], ledger: Ledger
) -> tuple[str, ...]:
    """Inputs and cotangents unmodified, replicas bitwise equal, one dtype, the default group unused in a larger world.

    Other groups outside the mesh, such as those from `dist.new_group`, are not checked.
    """
    sentences = [f"rank {rank}: {text}" for rank, result in enumerate(results) for text in result.hygiene]
    sentences += _unlike_dtypes(results) or _undeclared_dtypes(scheme, case, results[0])
    if scheme.replicas == "bitwise":
        sentences += [text for tensor in tensors for text in _replicas(tensor)]
    if "second_derivative" in case.conditions:
        sentences += _second_derivative(case, results, tensors)
    return tuple(sentences + _default_group(case, ledger))


def _second_derivative(case: CaseSpec, results: Sequence[RankResult], tensors: Sequence[TensorComparison]) -> list[str]:
    """The finding on wrong second derivatives; in a larger world, of the first group of ranks that has one."""
    gradients = [tensor for tensor in tensors if tensor.role == "gradient"]
    budget = sum(float((t.element_budgets * abs(inputs.direction(t.argument, case))).sum()) for t in gradients)
    terms_of_group: dict[int, list[Any]] = {}
    for result, coordinates in zip(results, inputs.coordinates(case.mesh), strict=True):
        terms_of_group.setdefault(coordinates.get(SPARE, 0), []).append(result.second)
    for terms in terms_of_group.values():
        if sentence := imbalance(terms, UNIT_ROUNDOFF[case.dtype], budget):
            return [sentence]
    return []


def _unlike_dtypes(results: Sequence[RankResult]) -> list[str]:
    first = results[0].dtypes
    return [
        f"rank {rank}: '{name}' is {dtype}, on rank 0 it is {first[name]}"
        for rank, result in enumerate(results)
        for name, dtype in result.dtypes.items()
        if dtype != first[name]
    ]


def _undeclared_dtypes(scheme: Declared, case: CaseSpec, result: RankResult) -> list[str]:
    """One sentence for each output with another dtype than `wide` declares."""
    return [
        f"'{name}' is {result.dtypes[name]}, declared {dtype} for {case.dtype} inputs"
        for name, dtype in declared_dtypes(scheme.outputs, scheme.wide, case.dtype).items()
        if result.dtypes[name] != dtype
    ]


def _replicas(tensor: TensorComparison) -> list[str]:
    copies = tensor.stitched.copies
    same = (copies == copies[:1]) | ((copies != copies) & (copies[:1] != copies[:1]))
    if bool(same.all()):
        return []
    copy, *where = (int(i) for i in np.argwhere(~same)[0])
    first, other = (", ".join(f"{axis}={i}" for axis, i in tensor.stitched.coordinates[of].items()) for of in (0, copy))
    place = f"at {index_text(tuple(where))}, " if where else ""  # a number has none
    return [f"{tensor.label}{UNEQUAL_REPLICAS}: {place}{other} is unlike {first}"]


def unequal_replicas(hygiene: Sequence[str]) -> set[str]:
    """The tensors with unequal replicas, according to the hygiene oracle's sentences."""
    return {sentence.partition(UNEQUAL_REPLICAS)[0] for sentence in hygiene if UNEQUAL_REPLICAS in sentence}


def _default_group(case: CaseSpec, ledger: Ledger) -> list[str]:
    """A finding if the full world is used although the scheme's own mesh is only a part of it.

    A message between two ranks of the scheme's mesh is not a finding: their global ranks are right in every group.
    """
    if SPARE not in case.mesh or case.mesh[SPARE] == 1:
        return []
    everyone = tuple(range(case.world))
    spare = [coordinates[SPARE] for coordinates in inputs.coordinates(case.mesh)]
    for row in ledger.rows:
        if row.group != everyone:
            continue
        if row.peer is None:
            return [f"the default group is used inside a sub-group: rank {row.rank}, {row}"]
        if spare[row.peer] != spare[row.rank]:
            return [
                f"a message leaves the mesh: rank {row.rank}, {row}; without a group, a peer is a global rank: "
                "pass dist.get_global_rank(group, place)"
            ]
    return []
