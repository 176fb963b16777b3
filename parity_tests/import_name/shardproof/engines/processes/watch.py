"""The parent watches one run: messages, ended processes, and a status table that stops changing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shardproof.engines import compiling
from shardproof.engines.ledger import LedgerRow
from shardproof.engines.processes.forks import ForkServer
from shardproof.engines.processes.root_cause import DONE, RUNNING, Outcome, find_root_cause
from shardproof.engines.processes.status_table import COMPUTING, STARTING, WAITING, StatusTable
from shardproof.engines.processes.traces import Traces

TICK_S = 0.05
STALL_S = 1.25  # all ranks wait or are done, and there is no progress
WINDOW_S = 0.25  # over which the processor time of threads is compared
AT_WORK = 0.25  # of that time, for the busiest thread: more than a polling thread uses
START_S = 120.0  # ranks are up and the function is loaded
PROBE_S = 0.3  # after which the waiting ranks' ledgers are compared
COLLECT_S = 0.25  # for the others, after the first failure
ANSWER_S = 0.1  # for a control thread to report its rows
BUSY_ANSWER_S = 0.5  # beside a thread that computes
COMPILER_ANSWER_S = 2.0  # beside a thread that traces a function and rarely releases the interpreter
REAP_S = 0.1  # between a closed socket and the report of how the process ended


class RankHandle:
    """The parent's end of one rank."""

    def __init__(self, rank: int, pid: int, work: Connection, control: Connection, folder: str) -> None:
        self.rank, self.pid, self.work, self.control = rank, pid, work, control
        self.traces = Traces(folder, rank, pid)
        self.is_ready = self.is_gone = False
        self.outcome: Outcome | None = None
        self._questions = 0

    def seen(self, seconds: float) -> tuple[tuple[LedgerRow, ...], str | None]:
        """The rank's rows so far and its line, even while it hangs; nothing if it does not answer in time."""
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
                if question == self._questions:  # a late answer to an earlier question is dropped
                    return rows, line, is_compiling
        except (EOFError, OSError):
            pass  # it has just died; the status table has its last row
        return (), None, False

    def close(self) -> None:
        self.work.close()
        self.control.close()


class _Stillness:
    """Seconds since the status table last changed, and seconds without any work of the ranks.

    Ranks that move a large tensor all wait, and the status table shows no progress; but one of their threads always
    runs, or is ready to. A waiting rank has one thread per group that polls for messages 200 times a second: together
    they use a good part of a core, but each uses little.
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
        """Restart the clocks while a rank compiles: it makes no progress in the table until the compiler is done."""
        self.seconds = self.idle_seconds = 0.0

    def has_ended(self) -> bool:
        """Whether the status table has changed since the last step."""
        return self._table.writes() != self._writes


def _demands(handles: Sequence[RankHandle]) -> dict[str, float]:
    """Processor seconds that each thread of the ranks has used or been ready for; empty if unknown here."""
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
    """Follows a job that was just sent to all handles."""

    def __init__(self, handles: Sequence[RankHandle], server: ForkServer, table: StatusTable) -> None:
        self._handles, self._server, self._table = handles, server, table
        for handle in handles:
            handle.is_ready, handle.outcome = False, None

    def outcomes(self, quiet_s: float) -> tuple[list[Outcome], float | None]:
        """Every rank's outcome, and the quiet seconds if the ranks were stopped for lack of progress."""
        start = last = time.monotonic()
        still, deadline, is_compiling = _Stillness(self._table), None, False
        while self._pending():
            self._receive(TICK_S)
            now = time.monotonic()
            step, last = min(now - last, 2 * TICK_S), now  # a delay of the parent itself does not count
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
                elif still.seconds >= limit and not still.has_ended():  # the rank may have left meanwhile
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
        """All ranks wait and their ledgers so far do not fit together, so there is no need to wait for a stall."""
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
        status = self._table.status(handle.rank)
        if handle.is_gone:
            return handle.traces.dead(self._table, self._server.exit_code(handle.pid, REAP_S))
        if status.state == WAITING:
            return Outcome(handle.rank, RUNNING, handle.seen(ANSWER_S)[0], state=str(status), is_waiting=True)
        rows, line = ((), None) if handle.traces.is_stopped else handle.seen(BUSY_ANSWER_S)
        if line is None:
            silent = handle.traces.silent(self._table)
            return replace(silent, rows=rows or silent.rows)
        return Outcome(handle.rank, RUNNING, rows, state=status.sentence(line), source=line)
