"""The cause of a failed run: which failed rank is the cause, and which only follow from it (victims).

In order of precedence: an exception of the function, a process that died, ledgers that do not fit together, an error
from inside a collective, a stall. A rank that failed because its peers were gone is a victim and never named first.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardproof.declare.case import CaseSpec
from shardproof.endings.signals import signal_name
from shardproof.engines import failure
from shardproof.engines.ledger import MESSAGES, Ledger, LedgerRow
from shardproof.engines.protocol import Disagreement, crossed, of_returned
from shardproof.engines.protocol import disagreement as disagreement

DONE, RAISED, DIED, RUNNING = "done", "raised", "died", "running"
_VICTIM = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out", "Application timeout")
_CAUSES = {
    cause.cause: cause
    for cause in (failure.Raised, failure.CollectiveMismatch, failure.Deadlock, failure.Unwaited, failure.Modified)
}


@dataclass(frozen=True)
class Outcome:
    """How one rank ended, or its place when it was stopped."""

    rank: int
    kind: str
    rows: tuple[LedgerRow, ...] = ()
    result: bytes = b""
    error: str = ""  # "ValueError: boom"; of a death: "by os._exit(0)", where that is known
    is_sentence: bool = False  # the error is a message of the harness that names the rank
    cause: str = "raised"
    source: str | None = None
    trace: str = ""
    from_backend: bool = False
    state: str = ""  # the status table: "waits in ..."
    is_waiting: bool = False
    exit_code: int | None = None

    @property
    def is_victim(self) -> bool:
        return self.kind == RAISED and any(phrase in self.error for phrase in _VICTIM)

    @property
    def last(self) -> LedgerRow | None:
        return self.rows[-1] if self.rows else None

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, awaited: LedgerRow | None = None) -> str:
        """How the rank ended, in words; another rank waits in the call `awaited`."""
        if self.kind == DONE:
            return of_returned(self.rank, self.rows, awaited)
        last = f" in {self.last}" if self.last else ""
        at = f" at {self.source}" if self.source else ""
        how = "left" if self.exit_code is None and self.error else ending(self.exit_code)
        what = {
            DIED: f"{how}{self.error and ' '}{self.error}{at}; it was last seen so: {self.state}",
            RUNNING: self.state,
        }.get(self.kind)
        if what is None:
            what = f"raised {self.error}{at}"
            if self.is_sentence:
                return self.error
            if self.cause == "unwaited":
                what = f"did not wait for {self.error}"
            elif self.is_victim:
                what = f"lost its peers{last}"
            elif self.from_backend:
                what = f"got an error{last}: {self.error}"
        return f"rank {self.rank} {what}"


def find_root_cause(
    outcomes: Sequence[Outcome], case: CaseSpec | None, quiet: float | None = None
) -> failure.RankFailure | None:
    """The failure to raise, or None if all ranks are done and their ledgers agree.

    `quiet` is the number of seconds without progress, if the ranks were stopped for that.
    """
    ledger = Ledger([row for outcome in outcomes for row in outcome.rows])
    raised = [o for o in outcomes if o.kind == RAISED]
    causes = [o for o in raised if not (o.from_backend or o.is_victim)]
    if causes:
        return _blame(causes[0], _CAUSES[causes[0].cause], outcomes, case, ledger)
    aborted = _abort_of_gloo(outcomes)
    if aborted is not None:
        return aborted.failure(case, ledger, {o.rank: str(o) for o in outcomes})
    for dead in (o for o in outcomes if o.kind == DIED):
        return _blame(dead, failure.Died, outcomes, case, ledger)
    problem = disagreement(ledger, complete=all(o.kind == DONE for o in outcomes))
    if problem is None and quiet is not None:
        problem = crossed({o.rank: o.last for o in outcomes if o.is_waiting and o.last}, ledger)
    if problem is not None:
        return problem.failure(case, ledger, {o.rank: str(o) for o in outcomes})
    for source in sorted(raised, key=lambda o: o.is_victim):
        return _blame(source, failure.Raised, outcomes, case, ledger)
    if quiet is not None:
        unfinished = [o for o in outcomes if o.kind == RUNNING]
        odd = next((o for o in unfinished if not o.is_waiting), unfinished[0])
        stalled = _blame(odd, failure.Stalled, outcomes, case, ledger)
        stalled.args = (f"nothing has moved for {quiet:.1f} s: {odd}",)
        awaited = odd.last if odd.is_waiting else None
        stalled.others = tuple(o.sentence(awaited) for o in outcomes if o is not odd)
        return stalled
    return None


def _abort_of_gloo(outcomes: Sequence[Outcome]) -> Disagreement | None:
    """The rows at which gloo aborted a process; it does so if a peer's message has more bytes than expected.

    Only the last rows of a dead process are known, so they are compared with the other ranks' rows in the same place.
    """
    for dead in outcomes:
        for row in dead.rows[::-1] if dead.exit_code == -signal.SIGABRT else ():
            others = [_in_place_of(row, outcome) for outcome in outcomes if outcome is not dead]
            problem = disagreement(Ledger([row, *filter(None, others)]), complete=False)
            if problem is not None:
                return replace(problem, what=f"{problem.what}, at which gloo aborted rank {dead.rank}")
    return None


def _in_place_of(row: LedgerRow, other: Outcome) -> LedgerRow | None:
    """The row of another rank that matches this row: its part of the collective, or the other end of the message."""
    if row.peer is not None:
        ends = (last for last in other.rows[::-1] if {row.op, last.op} == set(MESSAGES))
        return next((last for last in ends if (last.peer, row.peer, last.tag) == (row.rank, last.rank, row.tag)), None)
    place = (row.group, row.group_name, row.seq)
    same = (row for row in other.rows if row.peer is None and (row.group, row.group_name, row.seq) == place)
    return next(same, None)


def _blame(
    who: Outcome, kind: type[failure.RankFailure], outcomes: Sequence[Outcome], case: CaseSpec | None, ledger: Ledger
) -> failure.RankFailure:
    last = None if who.kind == DIED and not who.is_waiting else who.last  # it died after that collective, not in it
    error = kind(
        str(who),
        rank=who.rank,
        op=last.op if last else None,
        source=who.source or (last.source if last else None),
        case=case,
        others=[str(o) for o in outcomes if o is not who],
        ledger=ledger,
    )
    if who.trace:
        error.add_note(f"Traceback of rank {who.rank}:\n{who.trace}")
    return error


def ending(exit_code: int | None) -> str:
    """How a process ended, as a predicate: `was killed by SIGSEGV`."""
    if exit_code is None:
        return "ended without a word"
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"left with exit code {exit_code}"
