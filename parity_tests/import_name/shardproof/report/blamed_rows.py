"""The ledger rows that a report blames: rows at the call sites in its notes and findings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardproof.engines.ledger import PHASES, LedgerRow

if TYPE_CHECKING:
    from shardproof.report.report import Report


def blamed_rows(report: Report, by: Report | None = None) -> list[LedgerRow]:
    """The rows that a report blames in its own ledger, or that another report of the same scheme (`by`) blames.

    For a failed rank, that is its last row at the line of the failure. Otherwise they are the rows at the call sites of
    the notes and the protocol's findings, and the rows of ops whose calls or bytes are not as declared.
    """
    by = report if by is None else by
    failure = by.failure
    if failure is not None:
        here = (failure.op, failure.source)
        return [row for row in report.ledger.of(failure.rank) if (row.op, row.source) == here][-1:]
    findings = [*(note for notes in by.notes.values() for note in notes), *by.protocol]
    sites = [site for finding in findings for site in finding.sites]
    miscounted = set(_miscounted(report)) if by.cost else set()
    return [
        row
        for row in report.ledger.rows
        if any(site.has(row) for site in sites) or (row.rank, row.phase, row.op) in miscounted
    ]


def _miscounted(report: Report) -> Iterator[tuple[int, str, str]]:
    """Rank, phase and op for which the ledger's calls or bytes are not as declared."""
    for rank, declared in enumerate(report.declared_costs):
        for phase, short in PHASES.items():
            wanted, issued = declared.totals(phase), report.ledger.cost(rank, short)
            for op in {*wanted, *issued}:
                if tuple(wanted.get(op, (0, 0))) != issued.get(op, (0, 0)):
                    yield rank, short, op
