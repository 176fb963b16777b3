"""Three oracles besides the values: protocol (do the ledgers agree), cost (is it as declared), hygiene (was a tensor
modified, do replicas differ, was a wrong group used).

Each returns sentences; none means that the oracle passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from parity_tests.harness.declare.calls import OF_ANOTHER_COST
from parity_tests.harness.declare.case import ENGINES, SPARE, CaseSpec
from parity_tests.harness.declare.declaration_failure import raised_by
from parity_tests.harness.declare.declared import Cost, Declared
from parity_tests.harness.draw import inputs
from parity_tests.harness.judge.compare import TensorRow
from parity_tests.harness.run.ledger import Ledger
from parity_tests.harness.run.lockstep.backends import UNEVEN
from parity_tests.harness.run.program import Program, RankResult
from parity_tests.harness.run.protocol import disagreement

PHASES = {"forward": "fwd", "backward": "bwd"}


def protocol(ledger: Ledger, engines: Sequence[str] = ENGINES) -> tuple[str, ...]:
    """Ranks of a group issue the same sequence: op, dtype, shape, reduce op, root, splits; gloo and NCCL accept it.

    What gloo alone rejects is no finding where the scheme is declared for other `engines`.
    """
    difference = disagreement(ledger)
    accepted = (None,) if "gloo" in engines else (None, UNEVEN)
    rejections = (
        f"rank {row.rank} issued {row}: {row.rejected}" for row in ledger.rows if row.rejected not in accepted
    )
    rejected = next(rejections, None)
    return tuple(filter(None, (None if difference is None else str(difference), rejected)))


def costs_of_ranks(scheme: Declared, case: CaseSpec, program: Program) -> list[Cost]:
    """The declared cost of each rank of the case; inside a larger world, that of its place in the scheme's mesh.

    Errors: DeclarationFailure where the form raises.
    """
    assert scheme.cost is not None
    # A cost that depends on values, such as offsets, has the unsharded inputs that its signature names.
    names = list(inspect.signature(scheme.cost).parameters)[1:]
    try:
        declared = scheme.cost(case, **{a.name: program.full_array(a, case) for a in scheme.inputs if a.name in names})
        if isinstance(declared, Cost):
            return [declared] * case.world
        if len(declared) == 1:
            return [declared[0]] * case.world
        return [declared[_place(scheme, case, rank)] for rank in range(case.world)]
    except Exception as error:
        raise raised_by(f"scheme '{scheme.name}': its cost", error) from error


def _place(scheme: Declared, case: CaseSpec, rank: int) -> int:
    """The rank on the scheme's own mesh, which may be a part of the world."""
    coordinates, place = inputs.coordinates(case.mesh)[rank], 0
    for axis in scheme.mesh:
        place = place * case.mesh[axis] + coordinates[axis]
    return place


def cost(scheme: Declared, case: CaseSpec, ledger: Ledger, program: Program) -> tuple[str, ...]:
    """Calls and bytes per op and phase equal the declared closed form, on every rank, where the call is one that the
    form is of. Errors: DeclarationFailure where the form raises."""
    if scheme.cost is None or set(OF_ANOTHER_COST) & set(case.calls):
        return ()
    declared = costs_of_ranks(scheme, case, program)
    findings = []
    for phase, short in PHASES.items():
        for rank in range(case.world):
            promised: Mapping[str, tuple[int, int]] = getattr(declared[rank], phase)
            measured = ledger.cost(rank, short)
            for op in sorted({*promised, *measured}):
                want, got = tuple(promised.get(op, (0, 0))), measured.get(op, (0, 0))
                if want != got:
                    findings.append(
                        f"{phase} {op}: declared {want[0]} calls of {want[1]} bytes, "
                        f"rank {rank} issued {got[0]} of {got[1]}"
                    )
    return tuple(findings[:1]) if findings else ()


def hygiene(
    scheme: Declared, case: CaseSpec, results: Sequence[RankResult], rows: Iterable[TensorRow], ledger: Ledger
) -> tuple[str, ...]:
    """Inputs and cotangents untouched, replicas bit-equal, one dtype, no group used that is none of the mesh's."""
    findings = [f"rank {rank}: {text}" for rank, result in enumerate(results) for text in result.findings]
    findings += _unlike_dtypes(results)
    if scheme.replicas == "bitwise":
        findings += [text for row in rows for text in _replicas(row)]
    return tuple(findings + _foreign_groups(case, ledger))


def _unlike_dtypes(results: Sequence[RankResult]) -> list[str]:
    first = results[0].dtypes
    return [
        f"rank {rank}: '{name}' is {dtype}, on rank 0 it is {first[name]}"
        for rank, result in enumerate(results)
        for name, dtype in result.dtypes.items()
        if dtype != first[name]
    ]


def _replicas(row: TensorRow) -> list[str]:
    copies = row.stitched.copies
    same = (copies == copies[:1]) | ((copies != copies) & (copies[:1] != copies[:1]))
    if bool(same.all()):
        return []
    copy, *where = (int(i) for i in np.argwhere(~same)[0])
    at = ", ".join(f"{axis}={i}" for axis, i in row.stitched.coordinates[copy].items())
    return [f"{row.label} differs between replicas: at {at} from the first, at {tuple(where)}"]


def _foreign_groups(case: CaseSpec, ledger: Ledger) -> list[str]:
    """Rows over the full world where the scheme's own mesh is a part of it."""
    if SPARE not in case.mesh or case.mesh[SPARE] == 1:
        return []
    everyone = tuple(range(case.world))
    for row in ledger.rows:
        if row.group == everyone:
            return [f"the default group is used inside a sub-group: rank {row.rank}, {row}"]
    return []
