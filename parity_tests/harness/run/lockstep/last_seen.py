"""What each rank of this process does, in memory that a parent reads after a fatal signal has ended the process.

Ranks of lockstep are threads: one that is killed, or crashes in native code, takes the whole process with it. Where
`run.supervised` runs the command, the scheduler and the exchange write here; else nothing is written.
"""

from __future__ import annotations

from parity_tests.harness.run import supervised
from parity_tests.harness.run.ledger import LedgerRow
from parity_tests.harness.run.processes.status_table import COMPUTING, FINISHED, STARTING, WAITING, Slot

_slots: list[Slot] = []  # of the ranks of the run that goes on
_turn_of: Slot | None = None


def begin(world: int) -> None:
    """A run of so many ranks begins; with none, it is over. What an earlier one issued is forgotten."""
    global _turn_of
    for slot in _slots:
        slot.clear()
    table = supervised.table
    _slots[:] = [] if table is None else [table.slot(rank) for rank in range(min(world, table.world))]
    for slot in _slots:
        slot.enter(STARTING)
    _turn_of = None


def turn(rank: int, *, has_returned: bool) -> None:
    """The turn goes to a rank; `has_returned` says whether the one that had it has left."""
    global _turn_of
    if rank < len(_slots):
        if _turn_of is not None:
            _turn_of.enter(FINISHED if has_returned else WAITING)
        _turn_of = _slots[rank]
        _turn_of.enter(COMPUTING)


def issued(row: LedgerRow) -> None:
    """The rank that runs issues a collective."""
    if row.rank < len(_slots):
        _slots[row.rank].issue_as_text(row, COMPUTING)
