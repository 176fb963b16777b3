"""Schedules as files: one row for each rank, one action in each cell, blank where the rank waits.

A file that has nothing but F, B, I and W says what is computed; one that has SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD,
RESHARD or REDUCE_GRAD says all that is done. Faults are told with row and column, both from 1.
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from torch_impl.pipelining.order import (
    Action,
    Order,
    OrderFault,
    check_communication,
    check_computed,
    check_last_forwards,
    has_communication,
    inferred_stage_to_rank,
    parsed,
)
from torch_impl.pipelining.simulation import simulate

ARGUMENT = "pipeline_parallel_schedule_csv"


@dataclass(frozen=True)
class CsvSchedule:
    """A checked file: its order, the rank of each stage, and whether it says what is sent."""

    order: list[list[Action | None]]
    stage_to_rank: list[int]
    n_microbatches: int
    says_all: bool

    @property
    def stages_per_rank(self) -> list[int]:
        return [self.stage_to_rank.count(rank) for rank in range(len(self.order))]


def write_csv(order: Order, path: str | os.PathLike[str]) -> None:
    """Write an order as a file that `read_csv` gives back."""
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [["" if action is None else str(action) for action in actions] for actions in order]
        )


def read_csv(
    path: str | os.PathLike[str],
    *,
    pp_size: int | None = None,
    n_microbatches: int | None = None,
    argument: str = ARGUMENT,
) -> CsvSchedule:
    """A checked schedule of a file; ranks and micro-batches are those of the file where they are not given.

    Errors: FileNotFoundError with the argument's name; ValueError with row and column of the first fault: text that is
            no action, rows that are not one for each rank, a stage on two ranks or none, a micro-batch missing,
            doubled or out of order, on the last stage also among forwards, a message without its other end or out of
            turn, ranks that wait for each other.
    """
    rows = _rows(path, argument)
    try:
        order = [[_cell(rank, column, text) for column, text in enumerate(row)] for rank, row in enumerate(rows)]
        _check_rows(order, pp_size)
        stage_to_rank = inferred_stage_to_rank(order)
        found = max(action.microbatch or 0 for actions in order for cell in actions if cell for action in cell.parts)
        n = n_microbatches if n_microbatches is not None else found + 1
        check_computed(order, stage_to_rank, n)
        says_all = has_communication(order)
        if says_all:
            check_communication(order, stage_to_rank, n)
        simulate(order, stage_to_rank, n_microbatches=n)
        check_last_forwards(order, len(stage_to_rank) - 1)
    except OrderFault as fault:
        raise ValueError(
            f"{argument}={os.fspath(path)!r} row {fault.rank + 1}, column {fault.position + 1}: {fault.what}"
        ) from None
    return CsvSchedule(order, stage_to_rank, n, says_all)


def _rows(path: str | os.PathLike[str], argument: str) -> list[list[str]]:
    """Cells of a file, blank lines at its end left out."""
    shown = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except FileNotFoundError:
        raise FileNotFoundError(2, f"{argument}={shown!r} does not exist; pass the path of a CSV file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{argument}={shown!r} row 1, column 1: is no CSV text ({error}); pass a file of actions"
        ) from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def _cell(rank: int, column: int, text: str) -> Action | None:
    try:
        return parsed(text)
    except ValueError as error:
        raise OrderFault(rank, column, str(error)) from None


def _check_rows(order: list[list[Action | None]], pp_size: int | None) -> None:
    """One row for each rank, and in each row an action."""
    if not order or (pp_size is not None and len(order) < pp_size):
        raise OrderFault(len(order), 0, f"is missing; there must be one row for each of pp_size={pp_size or 1} ranks")
    if pp_size is not None and len(order) > pp_size:
        raise OrderFault(pp_size, 0, f"is one row too many; there must be one for each of pp_size={pp_size} ranks")
    for rank, actions in enumerate(order):
        if not any(actions):
            raise OrderFault(rank, 0, "the row has no action; every rank needs a stage")
