"""The collectives of a run as a figure: a row for each rank, a column for each collective in the order of issue."""

from __future__ import annotations

from typing import Any

from shardproof.engines.ledger import Ledger, LedgerRow
from shardproof.report import colours

INCHES_PER_RANK, WIDEST = 0.34, 11.0
MAX_WIDE_COLUMNS = 5  # up to so many columns, their names fit next to each other


def figure(ledger: Ledger, title: str = "") -> Any:
    """A box in the colour of each rank that takes part; above it the operation, size and line; backward is grey.

    For messages between two ranks, every rank's k-th send is one column, and every rank's k-th receive another.
    """
    from matplotlib.figure import Figure

    columns = _columns(ledger)
    ranks = sorted({row.rank for row in ledger.rows})
    is_narrow = len(columns) > MAX_WIDE_COLUMNS
    wide = min(1.4 + 0.85 * len(columns), WIDEST) if is_narrow else 1.4 + 1.5 * max(len(columns), 2)
    high = (2.2 if is_narrow else 1.3) + INCHES_PER_RANK * max(len(ranks), 1)
    canvas = Figure(figsize=(wide, high), layout="constrained")
    panel = canvas.subplots()
    for at, rows in enumerate(columns):
        for row in rows:
            colour = colours.of_rank(row.rank)
            panel.barh(row.rank, 0.8, 0.7, left=at - 0.4, color=colour, edgecolor="0.4", linewidth=0.5)
            panel.text(at, row.rank, str(row.rank), ha="center", va="center", fontsize=8, color=colours.ink(colour))
        if rows[0].phase == "bwd":
            panel.axvspan(at - 0.5, at + 0.5, color="0.9", zorder=0, linewidth=0)
    turned = {"rotation": 50, "ha": "left"} if is_narrow else {}
    panel.set_xticks(range(len(columns)), [_label(rows[0]) for rows in columns], fontsize=8, **turned)
    panel.xaxis.tick_top()
    panel.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    panel.set(xlim=(-0.5, max(len(columns), 1) - 0.5), ylim=(max(ranks, default=0) + 0.5, -0.5))
    panel.set_xlabel("collectives in the order of issue; backward on grey", fontsize=9)
    panel.set_title(title, loc="left", fontsize=10)
    return canvas


def _columns(ledger: Ledger) -> list[list[LedgerRow]]:
    """The rows of each collective: one group, one sequence number. Sends and receives are numbered separately."""
    columns: dict[tuple[object, ...], list[LedgerRow]] = {}
    for row in ledger.rows:
        key = (row.group, row.group_name, row.seq, row.op if row.peer is not None else "")
        columns.setdefault(key, []).append(row)
    return list(columns.values())


def _label(row: LedgerRow) -> str:
    return f"{row.op}, {row.payload} B\n{row.source}"
