"""Several processes at once: a thread waits for each, and all are ended when one of them raises or is interrupted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """`jobs` threads. `stopped` is set once their processes were ended for another reason than their own."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.stopped = jobs, threading.Event()
        self._sessions, self._lock = set[int](), threading.Lock()

    def each(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        """The results, in the order in which they come; tasks begin in theirs."""
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(function, task) for task in tasks]
            try:
                return [future.result() for future in as_completed(futures)]
            except BaseException:
                self.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                with self._lock:
                    for session in self._sessions:
                        end(session)
                raise

    @contextlib.contextmanager
    def session(self, pid: int) -> Iterator[None]:
        """A process that leads a session: it ends with the block, or when the others do, and what it started too."""
        with self._lock:
            self._sessions.add(pid)
        try:
            if self.stopped.is_set():
                end(pid)
            yield
        finally:
            with self._lock:
                self._sessions.discard(pid)
            end(pid)


def end(session: int) -> None:
    """Kill the processes of a session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, 9)
