"""Processes that a user's code has started and left behind, also in a session or a group of their own.

A process that adopts becomes the parent of each of its descendants whose own parent has ended, so that none is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
LOOK_S = 0.02


def adopt() -> None:
    """From now on, orphans among this process's descendants become its children; on Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


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
