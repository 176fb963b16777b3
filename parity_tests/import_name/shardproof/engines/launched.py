"""A rank under a launcher such as torchrun, and a parent process that checks how the rank ends.

torchrun counts a process that exits with 0 as a success, but native code can exit with 0 at any line. So a parent
stands between the launcher and the rank. It ends as the rank does, but with 3 if the rank exits with 0 and has not
recorded this status. If rank 0 dies, another process prints the verdicts so far, and runs nothing.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from shardproof.endings import exits, journal, signals
from shardproof.endings.exit_status import INTERNAL, RANK_FAILED
from shardproof.endings.journal import Journal
from shardproof.endings.last_words import LastWords
from shardproof.engines import last_act
from shardproof.engines.last_act import PASSED_ON, complain, flush
from shardproof.engines.processes import orphans

if TYPE_CHECKING:
    from shardproof.declare.case import CaseSpec
    from shardproof.engines.failure import RankFailure

AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun
TICK_S = 0.5
PATIENCE_S = 25.0  # torchrun kills a process that has not ended 30 s after a request
ORPHANS_S = 2.0  # how long the processes of an ended rank get to end by themselves

agent: int | None = None  # the process of the launcher, in a rank whose parent is a `Rank`
is_over = False  # this process prints the verdicts of a rank 0 that has died
_words: LastWords | None = None  # of this rank, shared with its parent


def note(case: CaseSpec) -> None:
    """Rank 0 runs this case next."""
    if _words is not None:
        _words.runs(case.json)


class Rank:
    """The parent of one rank."""

    def __init__(self, call: Callable[[], int | None], record: Journal) -> None:
        self._call, self._journal, self._words = call, record, LastWords()
        self._agent, self._parent = os.getppid(), os.getpid()
        self._passed_on: set[int] = {signal.SIGXCPU}  # signals that the rank has not sent to itself

    def status(self) -> int:
        """The exit status of the rank. If a signal has ended the rank, this process ends by the same signal."""
        signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        orphans.adopt()
        orphans.tie(self._agent, signal.SIGCHLD)  # wakes `_exit_code` when the launcher ends
        code = self._exit_code()
        if self._words.finished is not None and code >= 0:
            return self._words.finished
        from shardproof.engines.processes.root_cause import ending  # now: other ranks' parents need no torch

        rank = int(os.environ.get("RANK", "0"))
        died = f"rank {rank} {ending(code)} before it reported"
        sentence = f"died: {died}"
        if self._journal.begun is not None and code != RANK_FAILED and -code not in self._passed_on:
            from shardproof.engines.failure import Died

            self._exit_code(Died(died, rank=rank))
            if self._words.finished is None:
                complain(f"{sentence}; the verdicts so far could not be printed")
            return RANK_FAILED if self._words.finished is None else self._words.finished
        if code == 0:
            complain(sentence)
        if code < 0:
            orphans.end_by(-code)
        return code or RANK_FAILED

    def _exit_code(self, death: RankFailure | None = None) -> int:
        """The exit code of a child that runs the command, or prints its verdicts after its `death`; -N for signal N."""
        others = orphans.children()
        flush()
        key = self._journal.begun
        self._journal.start_child()
        child = os.fork()
        if child == 0:
            self._run(death, key)
        code: int | None = None
        ends = math.inf
        while code is None:
            received = signal.sigtimedwait((*PASSED_ON, signal.SIGCHLD), TICK_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._passed_on.add(received.si_signo)
            if received is not None and received.si_signo in signals.ASKING:
                os.kill(child, received.si_signo)  # a terminal interrupts the whole group of processes
                ends = min(ends, time.monotonic() + PATIENCE_S)
            if death is not None and time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
            if os.getppid() != self._agent:
                exits.leave(RANK_FAILED)  # the rank is tied to this process and gets a signal
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        orphans.end(but=others, grace_s=ORPHANS_S)
        return code

    def _run(self, death: RankFailure | None, key: str | None) -> NoReturn:
        global agent, is_over, _words
        status = INTERNAL
        try:
            agent, is_over, _words = self._agent, death is not None, self._words
            case = self._words.case
            self._words.clear()
            exits.install_alone()
            if is_over:
                # After one rank has died, the launcher asks the others to end, and waits before it kills them.
                signals.ignore_asking()
            is_watchful = AGENT in os.environ and not is_over
            if is_watchful:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup; a rank has no terminal
            # A rank of torchrun soon watches its parent itself, and reports before it ends.
            orphans.tie(self._parent, signal.SIGHUP if is_watchful else signal.SIGKILL)
            journal.current = self._journal
            if key is not None and death is not None:
                self._journal.lose(key, str(death), (death, case) if case else None)
            self._journal.read()
            status = last_act.recorded(self._call, self._words)
        finally:
            if os.getppid() == self._parent:  # a stopped parent would keep the launcher waiting for ever
                os.kill(self._parent, signal.SIGCONT)
            exits.leave(status)
