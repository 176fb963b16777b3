"""Processes that a user's code has started and left behind, also in a session or a group of their own.

A process that adopts becomes the parent of each of its descendants whose own parent has ended, so that none is lost.
A process that is tied ends with its parent, however that ends. Run as a file, this one is a keeper: it runs a command,
is tied, adopts, and ends with the command all that this has started. It loads nothing else, so that it starts in 30 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
LOOK_S = 0.02
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores, and no other program expects to be ignored


def adopt() -> None:
    """From now on, orphans among this process's descendants become its children; on Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def tie(parent: int, number: int = signal.SIGKILL) -> None:
    """From now on, this process gets a signal when the thread of `parent` that started it ends; on Linux only."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), number)


def kept(command: Sequence[str]) -> list[str]:
    """A command for this process to start, which does as `command` does and ends as it does.

    All that it has started ends with it: when it ends by itself, when this process ends, and at SIGTERM.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def keep(parent: int, command: Sequence[str]) -> NoReturn:
    """Be the keeper of a command for `parent`."""
    awaited = (signal.SIGCHLD, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*awaited, signal.SIGINT, signal.SIGHUP))
    adopt()
    _prctl(PR_SET_PDEATHSIG, signal.SIGCHLD)  # also sent when a mere thread of the parent ends
    child = os.fork()
    if child == 0:
        _become(command, before)
    code: int | None = None
    while code is None:
        ended = dict(_reaped())
        code = ended.get(child)
        if code is None and (os.getppid() != parent or signal.sigwait(awaited) == signal.SIGTERM):
            code = -signal.SIGTERM
    end()
    if code < 0:
        end_by(-code)
    os._exit(code)


def end_by(number: int) -> None:
    """End this process by the signal that ended its child, without a second core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))


def _become(command: Sequence[str], mask: Iterable[int]) -> NoReturn:
    """In the keeper's child: run the command, tied to the keeper, which SIGKILL ends without a word."""
    tie(os.getppid())
    for number in RESTORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], list(command))
    finally:
        os._exit(127)


def children() -> set[int]:
    """The ids of this process's children; empty where the system does not tell them."""
    ids: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                ids |= {int(number) for number in Path(f"/proc/self/task/{thread}/children").read_text().split()}
    return ids


def end(but: Collection[int] = (), grace_s: float = 0.0) -> None:
    """Kill this process's children, and theirs, except `but`; those that end within `grace_s` are left to do so."""
    deadline = time.monotonic() + grace_s
    while left := children() - set(but):
        for pid in left:
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK_S)


def _reaped() -> Iterator[tuple[int, int]]:
    """The children of this process that have ended, with their exit codes."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2:])
