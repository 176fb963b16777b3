"""The collectives that a report blames, found in its ledger by the op and the line that its sentences name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parity_tests.harness.run.ledger import PHASES, LedgerRow

if TYPE_CHECKING:
    from parity_tests.harness.report.report import Report


def convicted(report: Report, blamed: Report | None = None) -> list[LedgerRow]:
    """The rows of a report's ledger that it blames, or that another report of the same scheme does.

    These are the rows that a failure was raised in, those named by a note on a tensor or by the protocol, and those of
    an op whose calls or bytes are not as declared.
    """
    blamed = blamed or report
    failed = blamed.failure
    if failed is not None:
        of_rank = [row for row in report.ledger.of(failed.rank) if (row.op, row.source) == (failed.op, failed.source)]
        return of_rank[-1:]
    sentences = [note for notes in blamed.notes.values() for note in notes] + list(blamed.protocol)
    miscounted = set(_miscounted(report)) if blamed.cost else set()
    return [
        row
        for row in report.ledger.rows
        if any(_is_named(row, sentence) for sentence in sentences) or (row.rank, row.phase, row.op) in miscounted
    ]


def _is_named(row: LedgerRow, sentence: str) -> bool:
    """Whether a sentence has the row as it is written, or its op and line with its phase."""
    phase = r" \[bwd\]" if row.phase == "bwd" else r"(?! \[bwd\])"
    line = rf"(?<!\w){row.op}( #{row.seq})? at {re.escape(row.source)}(?!\d){phase}"
    return f"rank {row.rank} issued {row}" in sentence or re.search(line, sentence) is not None


def _miscounted(report: Report) -> Iterator[tuple[int, str, str]]:
    """Rank, phase and op where the calls or bytes of the ledger are not as declared."""
    for rank, declared in enumerate(report.declared_costs):
        for phase, short in PHASES.items():
            wanted, issued = declared.totals(phase), report.ledger.cost(rank, short)
            for op in {*wanted, *issued}:
                if tuple(wanted.get(op, (0, 0))) != issued.get(op, (0, 0)):
                    yield rank, short, op
