"""A chunk size bounds memory and changes nothing that ranks send."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardproof.verify_one_case import verify_case


def calls_of_all(declared: Any, chunk_sizes: Iterable[int | None], **case: Any) -> set[tuple[str, str]]:
    """(operation, phase) of each row in a case's ledger. Every chunk size must have the same ledger."""
    ledgers = set()
    for chunk_size in chunk_sizes:
        report = verify_case(declared, declared.case(**case, chunk_size=chunk_size))
        report.raise_if_failed()
        ledgers.add(tuple((row.rank, row.op, row.dtypes, row.shapes, row.phase) for row in report.ledger.rows))
    assert len(ledgers) == 1, f"{len(ledgers)} ledgers for {chunk_sizes}"
    return {(op, phase) for _, op, _, _, phase in ledgers.pop()}
