"""Calls and bytes of a ledger as a table, next to the scheme's declared cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from shardproof.declare.counted import counted
from shardproof.engines.ledger import PHASES
from shardproof.report.markup import tag

if TYPE_CHECKING:
    from shardproof.report.report import Report

HEADS = ("phase", "operation", "ranks", "calls", "bytes", "declared")
Sums = tuple[int, int]  # calls and bytes


def bytes_table(report: Report) -> Element:
    """One line per phase, operation and set of ranks with equal sums; calls and bytes are per rank."""
    lines = list(_lines(report))
    if not lines:
        return tag("p", "Nothing is sent.", class_="quiet")
    rows = [
        tag(
            "tr",
            tag("td", phase),
            tag("td", op),
            tag("td", _ranks(ranks)),
            *_numbers(issued),
            _declared(report, issued, declared),
        )
        for phase, op, ranks, issued, declared in lines
    ]
    head = tag("tr", *(tag("th", name) for name in HEADS))
    total = sum(issued[1] * len(ranks) for _, _, ranks, issued, _ in lines)
    of_a_row = "a row has the calls and the bytes that each of its ranks hands in"
    closing = tag("p", f"{counted(total, 'byte')} of all ranks together; {of_a_row}", class_="quiet")
    return tag("div", tag("table", head, *rows), closing, class_="wide")


def _lines(report: Report) -> Iterator[tuple[str, str, list[int], Sums, Sums | None]]:
    """Phase, operation, ranks with equal sums, the calls and bytes of each, and the declared ones if there are any."""
    ranks = sorted({row.rank for row in report.ledger.rows} | set(range(len(report.declared_costs))))
    for phase, short in PHASES.items():
        issued = {rank: report.ledger.cost(rank, short) for rank in ranks}
        declared = {rank: cost.totals(phase) for rank, cost in enumerate(report.declared_costs)}
        for op in dict.fromkeys(op for sums in (*declared.values(), *issued.values()) for op in sums):
            alike: dict[tuple[Sums, Sums | None], list[int]] = {}
            for rank in ranks:
                promised = declared[rank].get(op, (0, 0)) if rank in declared else None
                key = issued[rank].get(op, (0, 0)), None if promised is None else (promised[0], promised[1])
                alike.setdefault(key, []).append(rank)
            for (calls_and_bytes, promised), which in alike.items():
                if calls_and_bytes != (0, 0) or promised not in (None, (0, 0)):
                    yield phase, op, which, calls_and_bytes, promised


def _numbers(issued: Sums) -> list[Element]:
    return [tag("td", f"{number}", class_="number") for number in issued]


def _declared(report: Report, issued: Sums, declared: Sums | None) -> Element:
    if declared is None:
        return tag("td", "of another call" if report.cost_declared else "nothing", class_="quiet")
    if issued == declared:
        return tag("td", "\N{CHECK MARK} the same", class_="right")
    return tag("td", f"\N{BALLOT X} {counted(declared[0], 'call')} of {counted(declared[1], 'byte')}", class_="wrong")


def _ranks(ranks: Sequence[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
