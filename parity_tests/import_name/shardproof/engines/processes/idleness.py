"""How long a process and all that it has started have waited without computing, say for a lock that nobody frees.

Also how long they could compute: on a machine with more work than processors, a process that is ready has to wait.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_S = 2.0  # the time between two looks at the processes
BUSY = 0.03  # the share of a processor; a thread that polls uses less, as in torch while it waits for other ranks
TICKS = os.sysconf("SC_CLK_TCK")
STATE, USED = 0, slice(11, 15)  # fields after the name; the time used includes ended children
LEAST = 0.1  # share of the elapsed time that always counts, so processes that compute for ever end too
WAITING = "STtZ"  # asleep, stopped, ended; a process that is ready to compute is none of these


class Idleness:
    """How long one process and its descendants have been idle, on Linux."""

    def __init__(self, pid: int) -> None:
        self._pid, self._looked, self._used, self._seconds = pid, time.monotonic(), -1.0, 0.0
        self._was_ready = False

    def look(self) -> float:
        """The seconds for which no process has computed, counted from look to look."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed < LOOK_S:
            return self._seconds
        fields = [each for pid in _tree(self._pid) if (each := _fields(pid))]
        used = sum(int(number) for each in fields for number in each[USED]) / TICKS
        is_ready = any(each[STATE] not in WAITING for each in fields)
        # A thread that polls is ready at one look in twenty; a thread that gets no processor is ready at each look.
        is_idle = not (is_ready and self._was_ready) and abs(used - self._used) < BUSY * elapsed
        # A look that comes late was itself delayed, and so were the processes.
        self._seconds = self._seconds + min(elapsed, 2 * LOOK_S) if fields and is_idle else 0.0
        self._looked, self._used, self._was_ready = now, used, is_ready
        return self._seconds


class Ready:
    """How long a process has run or slept: time in which it was ready but got no processor does not count."""

    def __init__(self, pid: int) -> None:
        self._pid, self._looked, self._seconds = pid, time.monotonic(), 0.0
        self._delays = self._delays_now()

    def look(self, most_s: float) -> float:
        """The seconds so far. A look adds at most `most_s`, because a late look was itself delayed."""
        now, delays = time.monotonic(), self._delays_now()
        elapsed = min(now - self._looked, most_s)
        delayed = max((delay - self._delays.get(thread, delay) for thread, delay in delays.items()), default=0.0)
        self._seconds += max(elapsed - delayed, LEAST * elapsed)
        self._looked, self._delays = now, delays
        return self._seconds

    def _delays_now(self) -> dict[Path, float]:
        """For each thread, the seconds for which it was ready and had no processor; empty if Linux does not tell."""
        delays: dict[Path, float] = {}
        for pid in _tree(self._pid):
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended
                    delays[file] = int(file.read_text().split()[1]) / 1e9
        return delays


def _fields(pid: int) -> list[str]:
    """The fields of a process in /proc after its name; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _tree(pid: int) -> Iterator[int]:
    """The process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                    yield from _tree(int(child))
