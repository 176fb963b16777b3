"""The collectives that a report blames, of those in its ledger: the calls that its notes and findings carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parity_tests.harness.run.ledger import PHASES, LedgerRow

if TYPE_CHECKING:
    from parity_tests.harness.report.report import Report


def convicted(report: Report, blamed: Report | None = None) -> list[LedgerRow]:
    """The rows of a report's ledger that it blames, or that another report of the same scheme does.

    These are the rows that a failure was raised in, those that a note on a tensor or the protocol blames, and those of
    an op whose calls or bytes are not as declared.
    """
    blamed = blamed or report
    failed = blamed.failure
    if failed is not None:
        of_rank = [row for row in report.ledger.of(failed.rank) if (row.op, row.source) == (failed.op, failed.source)]
        return of_rank[-1:]
    findings = [*(note for notes in blamed.notes.values() for note in notes), *blamed.protocol]
    sites = [site for finding in findings for site in finding.sites]
    miscounted = set(_miscounted(report)) if blamed.cost else set()
    return [
        row
        for row in report.ledger.rows
        if any(site.has(row) for site in sites) or (row.rank, row.phase, row.op) in miscounted
    ]


def _miscounted(report: Report) -> Iterator[tuple[int, str, str]]:
    """Rank, phase and op where the calls or bytes of the ledger are not as declared."""
    for rank, declared in enumerate(report.declared_costs):
        for phase, short in PHASES.items():
            wanted, issued = declared.totals(phase), report.ledger.cost(rank, short)
            for op in {*wanted, *issued}:
                if tuple(wanted.get(op, (0, 0))) != issued.get(op, (0, 0)):
                    yield rank, short, op
