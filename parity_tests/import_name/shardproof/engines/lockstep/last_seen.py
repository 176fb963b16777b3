"""The last state of each rank in shared memory, for the parent to read after a fatal signal.

Ranks of lockstep are threads: one that is killed or crashes in native code ends the whole process. Under
`run.supervised`, the scheduler and the exchange write their state here; otherwise nothing is written.
"""

from __future__ import annotations

from shardproof.declare.case import CaseSpec
from shardproof.engines import supervised
from shardproof.engines.ledger import LedgerRow
from shardproof.engines.processes.status_table import COMPUTING, FINISHED, STARTING, WAITING, Slot

_slots: list[Slot] = []  # of the current run
_turn_of: Slot | None = None


def runs(case: CaseSpec) -> None:
    """The ranks run this case next."""
    if supervised.words is not None:
        supervised.words.runs(case.json)


def begin(world: int) -> None:
    """Begin a run of `world` ranks; 0 ends it. Forgets the last run."""
    global _turn_of
    for slot in _slots:
        slot.clear()
    table = supervised.table
    _slots[:] = [] if table is None else [table.slot(rank) for rank in range(min(world, table.world))]
    for slot in _slots:
        slot.enter(STARTING)
    _turn_of = None


def turn(rank: int, *, has_returned: bool) -> None:
    """A rank gets the turn; `has_returned` says whether the previous rank has finished."""
    global _turn_of
    if rank < len(_slots):
        if _turn_of is not None:
            _turn_of.enter(FINISHED if has_returned else WAITING)
        _turn_of = _slots[rank]
        _turn_of.enter(COMPUTING)


def beat(limit_s: float) -> None:
    """The interpreter is free; during a run the next beat is due within `limit_s`, after it none, which is 0."""
    if supervised.words is not None:
        supervised.words.beat(limit_s)


def issued(row: LedgerRow) -> None:
    """The running rank issues a collective."""
    if row.rank < len(_slots):
        _slots[row.rank].issue_as_text(row, COMPUTING)
