"""Schedules as CSV files: one row for each rank, one action in each cell, a blank cell for a step of waiting.

A file with F, B, I and W only states the computations; a file that also has SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD,
RESHARD or REDUCE_GRAD must state all communication too. Errors name row and column, both from 1.
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from torch_impl.contract import PositiveInt, contract
from torch_impl.pipelining.order import (
    Action,
    InvalidOrder,
    Order,
    check_communication,
    check_computed,
    check_last_forwards,
    has_communication,
    infer_stage_to_rank,
    parse_action,
)
from torch_impl.pipelining.simulation import Times, run_order

ARGUMENT = "pipeline_parallel_schedule_csv"


@dataclass(frozen=True)
class CsvSchedule:
    """A validated file: its order, the rank of each stage, and whether it states the communication."""

    order: list[list[Action | None]]
    stage_to_rank: list[int]
    n_microbatches: int
    has_communication: bool

    @property
    def stages_per_rank(self) -> list[int]:
        """The number of stages on each rank."""
        return [self.stage_to_rank.count(rank) for rank in range(len(self.order))]


@contract
def write_csv(order: Order, path: str | os.PathLike[str]) -> None:
    """Write `order` to the file `path`; `read_csv` reads it back.

    Errors: TypeError unless order has a list of actions for each rank; OSError for a path that cannot be written.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [["" if action is None else str(action) for action in actions] for actions in order]
        )


@contract
def read_csv(
    path: str | os.PathLike[str],
    *,
    pp_size: PositiveInt | None = None,
    n_microbatches: PositiveInt | None = None,
    argument: str = ARGUMENT,
) -> CsvSchedule:
    """Read and validate a schedule from the file `path`; error messages call it `argument`.

    Without `pp_size` and `n_microbatches` the file decides the number of ranks and micro-batches.

    Errors: FileNotFoundError with the argument's name; ValueError with the row and column of the first error: a cell
            that is not an action, a number of rows other than pp_size, a stage on two ranks or none, a micro-batch that
            is missing, repeated or out of order (on the last stage also among forwards), a message without its other
            end or out of turn, ranks that wait for each other.
    """
    rows = _rows(path, argument)
    try:
        # 1. Parse the cells, and count the rows.
        order = [[_cell(rank, column, text) for column, text in enumerate(row)] for rank, row in enumerate(rows)]
        _check_rows(order, pp_size)
        # 2. Check that each stage is on one rank and computes each micro-batch once.
        stage_to_rank = infer_stage_to_rank(order)
        last = max(action.microbatch or 0 for actions in order for cell in actions if cell for action in cell.parts)
        n = n_microbatches if n_microbatches is not None else last + 1
        check_computed(order, stage_to_rank, n)
        # 3. Check that messages match, if the file states them.
        is_complete = has_communication(order)
        if is_complete:
            check_communication(order, stage_to_rank, n)
        # 4. Check that nothing deadlocks, and that losses come in the order that torch expects.
        run_order(order, stage_to_rank, Times())
        check_last_forwards(order, len(stage_to_rank) - 1)
    except InvalidOrder as error:
        raise ValueError(
            f"{argument}={os.fspath(path)!r} row {error.rank + 1}, column {error.position + 1}: {error.problem}"
        ) from None
    return CsvSchedule(order, stage_to_rank, n, is_complete)


def _rows(path: str | os.PathLike[str], argument: str) -> list[list[str]]:
    """The cells of a file, without the blank lines at its end."""
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except FileNotFoundError:
        raise FileNotFoundError(2, f"{argument}={name!r} does not exist; pass the path of a CSV file") from None
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{argument}={name!r} row 1, column 1: not CSV text ({error}); pass a file of actions"
        ) from None
    # Editors and spreadsheets end files with blank lines; a blank line between rows is an error.
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def _cell(rank: int, column: int, text: str) -> Action | None:
    try:
        return parse_action(text)
    except ValueError as error:
        raise InvalidOrder(rank, column, str(error)) from None


def _check_rows(order: list[list[Action | None]], pp_size: int | None) -> None:
    """Check that there is one row for each rank, and an action in each row. Errors: InvalidOrder."""
    if not order or (pp_size is not None and len(order) < pp_size):
        raise InvalidOrder(len(order), 0, f"is missing; there must be one row for each of pp_size={pp_size or 1} ranks")
    if pp_size is not None and len(order) > pp_size:
        raise InvalidOrder(pp_size, 0, f"is one row too many; there must be one for each of pp_size={pp_size} ranks")
    for rank, actions in enumerate(order):
        if not any(actions):
            raise InvalidOrder(rank, 0, "the row has no action; every rank needs a stage")
