"""One run, watched by the parent: messages, ended processes, and a status table that no longer changes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from parity_tests.harness.run import compiling
from parity_tests.harness.run.ledger import LedgerRow
from parity_tests.harness.run.processes import crash
from parity_tests.harness.run.processes.forks import ForkServer
from parity_tests.harness.run.processes.root_cause import DIED, DONE, RUNNING, Outcome, find_root_cause
from parity_tests.harness.run.processes.status_table import COMPUTING, STARTING, WAITING, StatusTable

TICK_S = 0.05
STALL_S = 1.25  # all ranks wait or are done, and nothing moves
WINDOW_S = 0.25  # over which what ranks demand of the processor is compared
AT_WORK = 0.25  # of it, for the busiest thread: more than one takes that only looks for messages
START_S = 120.0  # ranks are up and the function is loaded
PROBE_S = 0.3  # after which their ledgers are compared
COLLECT_S = 0.25  # for the others, after the first failure
ANSWER_S = 0.1  # for a control thread to say what was issued
BUSY_ANSWER_S = 0.5  # beside a thread that computes
COMPILER_ANSWER_S = 2.0  # beside a thread that traces a function and leaves the interpreter seldom
REAP_S = 0.1  # between a closed socket and word of how the process ended


class RankHandle:
    """The parent's end of one rank."""

    def __init__(self, rank: int, pid: int, work: Connection, control: Connection, crash_file: Path) -> None:
        self.rank, self.pid, self.work, self.control = rank, pid, work, control
        self.crash_file = crash_file
        self.is_ready = self.is_gone = False
        self.outcome: Outcome | None = None
        self._questions = 0

    def seen(self, seconds: float) -> tuple[tuple[LedgerRow, ...], str | None]:
        """What the rank has issued and its line, also while it hangs; nothing if it does not answer in time."""
        return self._answer(seconds)[:2]

    def is_compiling(self) -> bool:
        """Whether the rank is inside torch.compile."""
        return self._answer(COMPILER_ANSWER_S)[2]

    def _answer(self, seconds: float) -> tuple[tuple[LedgerRow, ...], str | None, bool]:
        self._questions += 1
        try:
            self.control.send(self._questions)
            while self.control.poll(seconds):
                question, rows, line, is_compiling = self.control.recv()
                if question == self._questions:  # an answer that came too late for an earlier one is passed over
                    return rows, line, is_compiling
        except (EOFError, OSError):
            pass  # it died just now; the status table has its last row
        return (), None, False

    def close(self) -> None:
        self.work.close()
        self.control.close()


class _Stillness:
    """For how long the status table has not changed, and for how long the ranks have not been at work either.

    Ranks that move a large tensor all wait, and the status table says no more; but at any time one of their threads
    runs, or would if the machine had a processor for it. A rank that only waits has a thread for each of its groups
    that looks for messages 200 times a second, all of them together a good part of a core, but each of them little.
    """

    def __init__(self, table: StatusTable) -> None:
        self._table, self._writes = table, table.writes()
        self._window, self._demands = 0.0, None
        self.seconds = self.idle_seconds = self.unwritten_seconds = 0.0

    def step(self, seconds: float, handles: Sequence[RankHandle]) -> None:
        writes = self._table.writes()
        if writes != self._writes:
            self._writes, self._window, self._demands = writes, 0.0, None
            self.seconds = self.idle_seconds = self.unwritten_seconds = 0.0
            return
        self.seconds += seconds
        self.unwritten_seconds += seconds
        if self._demands is None:
            self._demands = _demands(handles)
            return
        self._window += seconds
        if self._window >= WINDOW_S:
            before, self._demands = self._demands, _demands(handles)
            busiest = max((now - before.get(thread, 0.0) for thread, now in self._demands.items()), default=0.0)
            self.idle_seconds = 0.0 if busiest > AT_WORK * self._window else self.idle_seconds + self._window
            self._window = 0.0

    def restart(self) -> None:
        """A rank is in the compiler: what comes after counts, although the table has not changed."""
        self.seconds = self.idle_seconds = 0.0

    def has_ended(self) -> bool:
        """Whether the status table has changed since the last step."""
        return self._table.writes() != self._writes


def _demands(handles: Sequence[RankHandle]) -> dict[str, float]:
    """Processor time in seconds that each thread of the ranks has had, or has been ready for; empty if unknown here."""
    seconds = {}
    for handle in handles:
        folder = f"/proc/{handle.pid}/task"
        with contextlib.suppress(OSError):  # the rank has ended
            for thread in os.listdir(folder):
                with contextlib.suppress(OSError):  # the thread has ended
                    text = Path(folder, thread, "schedstat").read_text()
                    seconds[f"{folder}/{thread}"] = sum(map(int, text.split()[:2])) / 1e9
    return seconds


class Watch:
    """Follows a job that has just been sent to all handles."""

    def __init__(self, handles: Sequence[RankHandle], server: ForkServer, table: StatusTable) -> None:
        self._handles, self._server, self._table = handles, server, table
        for handle in handles:
            handle.is_ready, handle.outcome = False, None

    def outcomes(self, quiet_s: float) -> tuple[list[Outcome], float | None]:
        """Every rank's outcome, and the seconds without a move if that is why they were stopped."""
        start = last = time.monotonic()
        still, deadline, is_compiling = _Stillness(self._table), None, False
        while self._pending():
            self._receive(TICK_S)
            now = time.monotonic()
            step, last = min(now - last, 2 * TICK_S), now  # a parent that was held up has seen no quiet
            if deadline is None and self._has_failed():
                deadline = now + COLLECT_S
            if deadline is not None and now >= deadline:
                break
            if deadline is not None:
                continue
            if not self._all_ready():
                if now - start > START_S:
                    return self._collected(), START_S
                continue
            probed = still.seconds >= PROBE_S
            still.step(step, self._pending())
            if self._computing():
                limit = quiet_s
            elif not probed and still.seconds >= PROBE_S and self._disagree():
                break
            else:
                limit = STALL_S if still.idle_seconds >= STALL_S else max(quiet_s, STALL_S)
            if is_compiling or still.seconds >= limit:
                in_time = still.unwritten_seconds < compiling.LIMIT_S
                is_compiling = in_time and any(handle.is_compiling() for handle in self._pending())
                if is_compiling:
                    still.restart()
                elif still.seconds >= limit and not still.has_ended():  # a rank may have left before it was asked
                    return self._collected(), still.seconds
        return self._collected(), None

    def _pending(self) -> list[RankHandle]:
        return [handle for handle in self._handles if handle.outcome is None and not handle.is_gone]

    def _has_failed(self) -> bool:
        return any(
            handle.is_gone or (handle.outcome is not None and handle.outcome.kind != DONE) for handle in self._handles
        )

    def _all_ready(self) -> bool:
        return all(handle.is_ready for handle in self._handles)

    def _computing(self) -> bool:
        return any(self._table.status(handle.rank).state in (COMPUTING, STARTING) for handle in self._pending())

    def _disagree(self) -> bool:
        """All wait, and what they have issued so far does not fit together: no need to wait for a stall."""
        return find_root_cause(self._collected(), None) is not None

    def _receive(self, timeout: float) -> None:
        pending = self._pending()
        moved = wait([*(handle.work for handle in pending), self._server.fileno()], timeout)
        if self._server.fileno() in moved:
            self._server.read()
        for handle in pending:
            if handle.work in moved:
                self._hear(handle)
        for handle in self._pending():  # a child of the rank may hold its socket open
            handle.is_gone = self._server.exit_code(handle.pid) is not None and not handle.work.poll()

    def _hear(self, handle: RankHandle) -> None:
        try:
            message = handle.work.recv()
        except (EOFError, OSError):  # OSError: it ended in the middle of a message
            handle.is_gone = True
            return
        if isinstance(message, Outcome):
            handle.outcome = message
        else:
            handle.is_ready = True

    def _collected(self) -> list[Outcome]:
        return [handle.outcome or self._last_seen(handle) for handle in self._handles]

    def _last_seen(self, handle: RankHandle) -> Outcome:
        status, last = self._table.status(handle.rank), self._table.row(handle.rank)
        last_row = () if last is None else (last,)
        if handle.is_gone:
            code = self._server.exit_code(handle.pid, REAP_S)
            stack = crash.stack(handle.crash_file)
            return Outcome(
                handle.rank,
                DIED,
                last_row,
                source=crash.line(stack),
                trace=stack,
                state=str(status),
                is_waiting=status.state == WAITING,
                exit_code=code,
            )
        if status.state == WAITING:
            return Outcome(handle.rank, RUNNING, handle.seen(ANSWER_S)[0], state=str(status), is_waiting=True)
        rows, line = handle.seen(BUSY_ANSWER_S)
        return Outcome(handle.rank, RUNNING, rows, state=status.sentence(line), source=line)
