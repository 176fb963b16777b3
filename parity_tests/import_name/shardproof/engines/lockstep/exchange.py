"""The exchange of a session: matches the calls of all ranks, writes them to the ledger and checks them.

It sits between the process groups, which torch calls, and the scheduler, which decides which rank runs.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch

from shardproof.declare.case import CaseSpec
from shardproof.endings.raised import message_of, printable
from shardproof.engines.failure import (
    CANNOT_RUN,
    CollectiveMismatch,
    Deadlock,
    Modified,
    Raised,
    RankFailure,
    RankFault,
    Shared,
    Stalled,
    Unwaited,
    raised_by_function,
)
from shardproof.engines.ledger import Ledger, LedgerRow, call_site, is_plumbing, raised_at
from shardproof.engines.lockstep import last_seen
from shardproof.engines.lockstep.call import CommunicationCall
from shardproof.engines.lockstep.rendezvous import CallsDiffer, MessageQueues, Rendezvous
from shardproof.engines.lockstep.scheduler import Halt, Scheduler
from shardproof.engines.protocol import of_returned

if TYPE_CHECKING:
    from shardproof.engines.lockstep.repair import Repair

GroupKey = tuple[str, tuple[int, ...]]
THREADS = (
    "ranks of lockstep are threads, which share what a library's module, a class or a closure keeps: "
    "bind it in setup=, name its module in isolate=, or run with --engine gloo"
)
THREAD = (
    f"{CANNOT_RUN}: there a rank is one thread, which waits for its turn; call it in the rank's thread, or "
    "verify with --engine gloo"
)
# Torch's messages for a group that the calling rank does not have.
NO_TURN = "a thread that no rank runs in"  # in the message of a group's method in such a thread
OF_NO_RANK = (NO_TURN, "Could not resolve the process group", "Default process group has not been initialized")
UNREGISTERED = ("is not registered, please create group", "Could not resolve the process group")


class Exchange:
    """All communication of the ranks of a session; `reset` begins an example."""

    def __init__(self, scheduler: Scheduler, axes: dict[str, int]) -> None:
        self.scheduler, self.axes = scheduler, axes
        self.reset(None)

    def reset(self, case: CaseSpec | None) -> None:
        self.case, self.ledger = case, Ledger()
        self.repair: Repair | None = None  # changes one line's calls in this example, to test that line
        self._count: dict[object, int] = defaultdict(int)
        self._rendezvous: dict[tuple[GroupKey, int], Rendezvous] = {}
        self._queues: dict[GroupKey, MessageQueues] = defaultdict(MessageQueues)
        self._tracked: list[dict[CommunicationCall, None]] = [{} for _ in range(self.scheduler.world)]
        self._owed: list[dict[CommunicationCall, None]] = [{} for _ in range(self.scheduler.world)]
        self._in_flight: dict[CommunicationCall, None] = {}
        self._creations: dict[tuple[tuple[int, ...], int], dict[int, CommunicationCall]] = defaultdict(dict)
        self._returned: set[int] = set()  # ranks that have returned and wait only for work they left

    def next_seq(self, rank: int, line: object) -> int:
        """How many calls this rank has issued on `line` before."""
        self._count[rank, line] += 1
        return self._count[rank, line] - 1

    def collective(self, key: GroupKey, call: CommunicationCall) -> None:
        """Issue a collective."""
        # 1. Note the call in the ledger; the n-th call of each rank in a group belongs together.
        self._issue(call)
        spot = (key, call.row.seq)
        rendezvous = self._rendezvous.setdefault(spot, Rendezvous(len(key[1])))
        # 2. Compare it with the earlier calls: a mismatch fails the run here and names both sides.
        try:
            complete = rendezvous.arrive(call)
        except CallsDiffer as error:
            self._fail(CollectiveMismatch, f"{error}{self._default_group_note(error.first, error.second)}", call.row)
        # 3. The last to arrive completes all; each rank writes its results when it waits.
        if complete:
            del self._rendezvous[spot]
            if self.repair is not None:
                self.repair.mend_results(complete)
            for each in complete:
                self._complete(each)
        self.scheduler.maybe_yield(call.row.rank)

    def post(self, key: GroupKey, call: CommunicationCall, peer: int | None) -> None:
        """Issue a send or a receive; `peer` is the other rank's place, None to receive from any rank."""
        self._issue(call)
        queues = self._queues[key]
        try:
            other = queues.receive(call, peer) if call.row.op == "recv" or peer is None else queues.send(call, peer)
        except CallsDiffer as error:
            self._fail(CollectiveMismatch, str(error), call.row)
        if other is not None:
            self._complete(other)
            self._complete(call)
        self.scheduler.maybe_yield(call.row.rank)

    @contextmanager
    def creation(self, row: LedgerRow) -> Iterator[None]:
        """Issue the creation of a group. Its members wait for one another, as on gloo; the other ranks go on."""
        call = CommunicationCall(row, 0, [], [])
        self._issue(call)
        arrived = self._creations[row.group, row.seq]
        for other in arrived.values():
            if other.row.members != row.members:
                both = f"rank {other.row.rank} in {other.row}; rank {row.rank} in {row}"
                self._fail(CollectiveMismatch, f"member lists differ: {both}", row)
        arrived[row.rank] = call
        members = row.members or ()
        if arrived.keys() >= set(members):
            for rank in members:
                self._complete(arrived[rank])
        self.scheduler.maybe_yield(row.rank)
        if row.rank in members:
            self.wait(call)
        yield

    def wait(self, call: CommunicationCall) -> None:
        """Block until the call is complete, then write its results; waiting again does nothing."""
        rank = call.row.rank
        self._owed[rank].pop(call, None)
        self.scheduler.wait(rank, call)
        if call.waited:
            return
        call.waited = True
        if call.tracked:
            self._tracked[rank].pop(call, None)
            change = call.disturbed()
            if change is not None:
                self._fail(Modified, f"rank {rank} in {call.row}: {change}", call.row)
        call.write()
        self._in_flight.pop(call, None)

    def owe(self, calls: Sequence[CommunicationCall]) -> None:
        """A rank has taken the future of these calls, which have their results. The rank must still `wait` for them."""
        for call in calls:
            if call.tracked and call.waited:
                self._owed[call.row.rank][call] = None

    def settle(self, rank: int) -> None:
        """After a rank's results are taken: wait for the work that it never waited for, and mark it in the ledger."""
        for call in self._owed[rank]:
            self.ledger.rows[call.order] = replace(call.row, unwaited=True)
        for call in list(self._tracked[rank]):
            self._returned.add(rank)
            self.ledger.rows[call.order] = replace(call.row, unwaited=True)
            self._wait_functional(call)
            self.wait(call)

    def drop(self, rank: int) -> None:
        """After a failure: remove this rank's unfinished work from torch's registry of functional work."""
        for call in list(self._tracked[rank]):
            with suppress(Halt):
                self._wait_functional(call)

    def _wait_functional(self, call: CommunicationCall) -> None:
        """Wait as the caller of a functional collective would, which removes it from torch's registry."""
        for tensor in (*call.outputs, *call.sources):
            plain = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which has no rule for wait_tensor
            torch.ops._c10d_functional.wait_tensor(plain)

    def _issue(self, call: CommunicationCall) -> None:
        self.scheduler.check()
        call.order = len(self.ledger.rows)
        self.ledger.rows.append(call.row)
        last_seen.issued(call.row)
        for other in self._in_flight:
            if other.row.rank != call.row.rank and (other.writes & call.storages or call.writes & other.storages):
                what = f"rank {call.row.rank} hands in a storage that rank {other.row.rank} has handed in"
                self._fail(Shared, f"{what}, {other.row}, in {call.row}; {THREADS}", call.row)
        self._in_flight[call] = None
        if call.tracked:
            self._tracked[call.row.rank][call] = None

    def _complete(self, call: CommunicationCall) -> None:
        call.done = True
        self.scheduler.wake(call.row.rank, call)

    # Failures and their messages.

    def foreign_group(self, op: str, owner: int, label: str) -> NoReturn:
        """The running rank called another rank's handle of a group."""
        rank, source = self.scheduler.running, call_site()
        what = f"rank {rank} calls {op} at {source} on the process group {label} of rank {owner}"
        self.scheduler.fail(self._failure(Shared, f"{what}; {THREADS}", rank, op, source))

    def in_a_thread(self, rank: int, error: BaseException) -> None:
        """An exception ended a thread that the rank started. It has no turn, so a collective in it raises as well."""
        self.raised(rank, error, f"\n{THREAD}" if any(phrase in message_of(error) for phrase in OF_NO_RANK) else "")

    def raised(self, rank: int, error: BaseException, remark: str = "") -> None:
        """A rank's own exception, with the user's frames only; a verdict of the harness is raised unchanged."""
        error, last = raised_by_function(error), next(reversed(self.ledger.of(rank)), None)
        # Without columns: in a narrow terminal the marks below a wrapped line would point at nothing.
        frames = [
            traceback.FrameSummary(frame.filename, frame.lineno, frame.name)
            for frame in traceback.extract_tb(error.__traceback__)
            if not is_plumbing(frame.filename)
        ]
        summary = printable("".join(traceback.format_exception_only(error))).strip()
        message = "".join([f"rank {rank} raised {summary}\n", *traceback.format_list(frames)]).rstrip() + remark
        if not remark and any(phrase in message_of(error) for phrase in UNREGISTERED):
            message += f"\nif it is the process group of another rank: {THREADS}"
        if isinstance(error, RankFault):  # the harness's own message, which names the rank
            message = str(error)
        failure = self._failure(Raised, message, rank, last.op if last else None, raised_at(error))
        failure.__cause__ = error
        if isinstance(error, RankFailure):
            error.case, error.others, error.ledger = self.case, failure.others, self.ledger
            failure = error
        self.scheduler.failure = self.scheduler.failure or failure

    def stuck(self) -> RankFailure:
        """No rank can run."""
        waiting = [
            (rank, call.row) for rank, call in enumerate(self.scheduler.waits) if isinstance(call, CommunicationCall)
        ]
        rank, row = next((each for each in waiting if each[0] not in self._returned), waiting[0])
        if rank in self._returned:  # no rank waits inside the function
            return self._failure(Unwaited, f"{self._state(rank)}, which is never complete", rank, row.op, row.source)
        note = self._default_group_note(*(row for _, row in waiting)) + self._call_from_two_lines()
        return self._failure(Deadlock, f"{self._state(rank)}{note}", rank, row.op, row.source, awaited=row)

    def stalled(self, stack: str, seconds: float) -> RankFailure:
        """The running rank has not come back in time."""
        rank = self.scheduler.running
        last = next(reversed(self.ledger.of(rank)), None)
        before = f"last {last}" if last else "it has called none"
        message = f"rank {rank} has reached no collective for {seconds:g} s; {before}\n{stack}"
        return self._failure(Stalled, message, rank, last.op if last else None, last.source if last else None)

    def _fail(self, kind: type[RankFailure], message: str, row: LedgerRow) -> NoReturn:
        self.scheduler.fail(self._failure(kind, message, row.rank, row.op, row.source))

    def _failure(
        self,
        kind: type[RankFailure],
        message: str,
        rank: int,
        op: str | None,
        source: str | None,
        awaited: LedgerRow | None = None,
    ) -> RankFailure:
        others = [self._state(other, awaited) for other in range(self.scheduler.world) if other != rank]
        return kind(message, rank=rank, op=op, source=source, case=self.case, others=others, ledger=self.ledger)

    def _state(self, rank: int, awaited: LedgerRow | None = None) -> str:
        pending = self.scheduler.waits[rank]
        if isinstance(pending, CommunicationCall):
            how = "returned and never waited for" if rank in self._returned else "waits in"
            return f"rank {rank} {how} {pending.row}"
        if self.scheduler.finished[rank]:
            return of_returned(rank, self.ledger.of(rank), awaited)
        last = next(reversed(self.ledger.of(rank)), None)
        if last is None:
            return f"rank {rank} was stopped before its first collective"
        return f"rank {rank} was stopped before its next collective; its last was {last}"

    def _call_from_two_lines(self) -> str:
        """Name the first call that two ranks issued from different lines: a rank that skipped a call is one ahead.

        If shapes agree, its next call matches the others' earlier one, and the ranks wait only at the last call.
        """
        first: dict[tuple[tuple[int, ...], str, int], LedgerRow] = {}
        for row in self.ledger.rows:
            if row.peer is not None:
                continue
            other = first.setdefault((row.group, row.group_name, row.seq), row)
            if (other.source, other.phase) != (row.source, row.phase):
                places = " and ".join(
                    f"at {each.source}{' [bwd]' if each.phase == 'bwd' else ''} on rank {each.rank}"
                    for each in (other, row)
                )
                return f"; call #{row.seq} of group {row.group_name} is {places}: one of them may have left out a call"
        return ""

    def _default_group_note(self, *rows: LedgerRow) -> str:
        """A note for ranks that meet or wait in the default group of a mesh with smaller groups."""
        if not any(row.group_name == "world" for row in rows):
            return ""
        return f"; group world is the default group, all {self.scheduler.world} ranks must come to it"
