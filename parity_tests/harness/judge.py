"""Judge one case: run the ranks, evaluate the reference, ask the four oracles, and say what kind of mistake it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from parity_tests.harness import compare, conduct, oracle
from parity_tests.harness.case import CaseSpec
from parity_tests.harness.engines.failure import RankFailure
from parity_tests.harness.engines.ledger import Ledger
from parity_tests.harness.engines.run import run
from parity_tests.harness.explain import explain
from parity_tests.harness.report import Report
from parity_tests.harness.witness import evidence

if TYPE_CHECKING:
    from parity_tests.harness.program import Program
    from parity_tests.harness.scheme import Scheme


def judge(
    scheme: Scheme,
    case: CaseSpec,
    *,
    quiet_s: float | None = None,
    reference: oracle.Reference | None = None,
    ship: Callable[[Program], Callable[..., Any]] | None = None,
    **given: Any,
) -> Report:
    """The report of one case; `given` may carry `arrays` and `cotangents` to use in place of drawn ones.

    `reference` spares evaluating it again; `ship` wraps what travels to the ranks. A failed rank is in the report,
    not raised. Errors: ReferenceFailure where the reference cannot be evaluated.
    """
    program = scheme.program(**given)
    reference = reference or oracle.evaluate(scheme, program, case)
    try:
        ranks = run(ship(program) if ship else program, case, case.engine, quiet_s=quiet_s)
    except RankFailure as failure:
        return Report(scheme.key, case, failure=failure, ledger=failure.ledger or Ledger())
    rows = compare.compare(scheme, case, ranks.results, reference)
    protocol = conduct.protocol(ranks.ledger)
    outputs_pass = all(row.ok for row in rows if row.role == "output")
    notes = {
        row.label: explain(evidence(scheme, program, case, row, outputs_pass, ranks.ledger, protocol))
        for row in rows
        if not row.ok
    }
    return Report(
        scheme.key,
        case,
        rows=tuple(rows),
        protocol=protocol,
        cost=conduct.cost(scheme, case, ranks.ledger),
        hygiene=conduct.hygiene(scheme, case, ranks.results, rows, ranks.ledger),
        notes=notes,
        ledger=ranks.ledger,
        cost_declared=scheme.cost is not None,
        seconds=ranks.seconds,
    )
