"""Files that a rank leaves in a folder for processes that outlive it, or that it no longer answers.

With the status table they show how and where a rank ended. They hold the number of its process, its stack at a fatal
signal, and the call by which it ended its process. A process that still runs writes its stacks at the signal STACKS.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import IO

from shardproof.endings import exits
from shardproof.endings.signals import STACKS
from shardproof.engines.processes import crash
from shardproof.engines.processes.root_cause import DIED, RUNNING, Outcome
from shardproof.engines.processes.status_table import WAITING, StatusTable

PREFIX = "shardproof_"
STACKS_S = 0.2  # for the fault handler of a rank that does not answer
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SIGNALS = {
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
    "Segmentation fault": signal.SIGSEGV,
}


def folder_of_job(agent: int) -> str:
    """A new folder for the ranks that `agent` has started on this host. Errors: OSError.

    It removes the folders of earlier jobs whose ranks all died at once, with no rank left to remove them.
    """
    # Process numbers are valid in one namespace of one host; others may share the folder of temporary files.
    namespace = os.stat("/proc/self/ns/pid").st_ino if Path("/proc/self/ns/pid").exists() else 0
    ours = f"{PREFIX}{platform.node()}_{namespace}_"
    for old in Path(tempfile.gettempdir()).glob(f"{glob.escape(ours)}*"):
        number = old.name.removeprefix(ours).partition("_")[0]
        if number.isdecimal() and not _exists(int(number)):
            shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{ours}{agent}_")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True


class Traces:
    """The traces of one rank; `pid` if the reader has started its process."""

    def __init__(self, folder: str | Path, rank: int, pid: int | None = None) -> None:
        self._folder, self._rank, self._pid = Path(folder), rank, pid
        self._crash, self._stacks = crash.path(folder, rank), crash.stacks_path(folder, rank)
        self._noted, self._process = crash.noted_path(folder, rank), Path(folder) / f"process_{rank}"

    # The rank's side.

    def begin(self) -> IO[str]:
        """Call this once, in the rank's process. Returns the file of its stacks."""
        crash.record(self._crash)
        exits.install(self._noted.write_text, raises=False)
        self._process.write_text(str(os.getpid()))
        return crash.answer_with_stacks(self._stacks)

    def leave(self) -> None:
        """The rank ends by itself, and has said why."""
        with contextlib.suppress(OSError):
            self._process.unlink()

    # The readers' side.

    @property
    def pid(self) -> int | None:
        """The number of the rank's process; None before it has begun, and after it has left by itself."""
        if self._pid is None:
            with contextlib.suppress(OSError, ValueError):
                self._pid = int(self._process.read_text())
        return self._pid

    @property
    def is_running(self) -> bool:
        return self._state() not in ("", "Z")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the rank's process."""
        return self._state() == "T"

    def _state(self) -> str:
        """The system's letter for the state of the process: Z if it has ended; empty if the process is gone."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][:1]
        return ""

    def line_in_native_code(self) -> str | None:
        """The line of a rank that cannot answer: it is stopped, or a thread holds the interpreter in native code."""
        if self.pid is None or not self._stacks.exists():  # it has not come to the point where it answers
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS)
            os.kill(self.pid, signal.SIGCONT)
            time.sleep(STACKS_S)
        return crash.line_of_running(crash.stack(self._stacks))

    def dead(self, table: StatusTable, exit_code: int | None = None) -> Outcome:
        """The outcome of a rank after its process has ended; a crash tells its exit code."""
        status, stack = table.status(self._rank), crash.stack(self._crash)
        fatal = _FATAL.search(stack)
        if exit_code is None and fatal is not None and fatal[1] in _SIGNALS:
            exit_code = -_SIGNALS[fatal[1]]
        call, _, place = crash.stack(self._noted).partition(" at ")
        return Outcome(
            self._rank,
            DIED,
            table.rows(self._rank),
            source=place or crash.line(stack) or crash.line_of_running(crash.stack(self._stacks)),
            error=f"by {call}" if call else "",
            trace=stack,
            state=str(status),
            is_waiting=status.state == WAITING,
            exit_code=exit_code,
        )

    def silent(self, table: StatusTable) -> Outcome:
        """The place of a rank that runs and does not answer."""
        status, is_stopped = table.status(self._rank), self.is_stopped
        if status.state == WAITING and not is_stopped:
            return Outcome(self._rank, RUNNING, table.rows(self._rank)[-1:], state=str(status), is_waiting=True)
        line = self.line_in_native_code()
        state = status.sentence(line)
        return Outcome(
            self._rank,
            RUNNING,
            table.rows(self._rank)[-1:],
            state=f"is stopped by a signal; it {state}" if is_stopped else state,
            source=line,
        )
