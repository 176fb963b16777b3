"""Run a command in its own process, so that the parent can report which rank killed it.

On lockstep the ranks are threads of the command, and a rank that is killed or crashes in native code ends the whole
process without a message. The parent, which has loaded nothing, waits; it reads the ranks' last state from shared
memory (see lockstep/last_seen.py) and the stack that Python's fault handler wrote.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import IO, NoReturn

from shardproof.engines.exit_status import RANK_FAILED
from shardproof.engines.processes.status_table import COMPUTING, StatusTable

MOST_RANKS = 64
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
UNDER_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "RANK")  # which kills processes by their ids itself
SENT_BY_A_PROCESS = 0  # si_code; a terminal's signal reaches the child without help
PR_SET_PDEATHSIG = 1  # of Linux's prctl

table: StatusTable | None = None  # of the command in this process, shared with its parent


def supervised(call: Callable[[], int | None]) -> int:
    """The status of `call`, run in a forked process; 3, and a sentence on stderr, if a fatal signal ends it.

    Signals sent to this process alone are forwarded, and the child ends when its parent is killed. The forked process
    never returns from here. `call` runs in this process under a launcher such as torchrun, and if a fork is not safe:
    JAX is loaded, or another thread runs.
    """
    is_launched = any(name in os.environ for name in UNDER_A_LAUNCHER)
    if is_launched or not sys.platform.startswith("linux") or "jax" in sys.modules or threading.active_count() > 1:
        return call() or 0
    parent, watched = os.getpid(), (*PASSED_ON, signal.SIGCHLD)
    with tempfile.TemporaryFile("w+") as stack:
        shared = StatusTable(None, MOST_RANKS)
        _flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # none is lost between the fork and the wait
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
            _run(call, shared, stack, parent)
        status = _exit_code(child, watched)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        if status >= 0:
            return status
        if -status not in FATAL:  # end this process the same way
            signal.signal(-status, signal.SIG_DFL)
            os.kill(parent, -status)
        print(f"shardproof: {_sentence(status, shared, stack)}", file=sys.stderr)
        return RANK_FAILED


def _run(call: Callable[[], int | None], shared: StatusTable, stack: IO[str], parent: int) -> NoReturn:
    """In the forked process: run the command and exit as a process does after its last line."""
    global table
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it was killed before prctl took effect
            faulthandler.enable(stack, all_threads=False)
            table = shared
            status = call() or 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    try:
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the process that started this one
            with contextlib.suppress(OSError):  # or its reader has left
                stream.flush()


def _exit_code(child: int, watched: tuple[signal.Signals, ...]) -> int:
    """Wait for the child and forward signals from other processes; returns minus N if signal N ended the child."""
    while True:
        received = signal.sigwaitinfo(watched)
        if received.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif received.si_code == SENT_BY_A_PROCESS:
            os.kill(child, received.si_signo)


def _sentence(exit_code: int, shared: StatusTable, stack: IO[str]) -> str:
    """A sentence: which rank ran when the process ended, where, and the state of the others."""
    # Imported only now: the parent of a command that ends normally loads no torch.
    from shardproof.engines.failure import Died
    from shardproof.engines.processes import crash
    from shardproof.engines.processes.root_cause import DIED, RUNNING, Outcome

    stack.seek(0)
    line = crash.line(stack.read())
    statuses = {rank: status for rank in range(shared.world) if (status := shared.status(rank)).writes}
    outcomes = [
        Outcome(rank, DIED, source=line, state=str(status), exit_code=exit_code)
        if status.state == COMPUTING
        else Outcome(rank, RUNNING, state=str(status))
        for rank, status in statuses.items()
    ]
    dead = next((outcome for outcome in outcomes if outcome.kind == DIED), None)
    if dead is None:
        at = f" at {line}" if line else ""
        return f"the process of the command was killed by {signal.Signals(-exit_code).name}{at}"
    others = [str(outcome) for outcome in outcomes if outcome is not dead]
    return f"{Died(str(dead), rank=dead.rank, others=others)}\n  --engine gloo runs each rank in a process of its own"
