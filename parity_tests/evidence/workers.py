"""Several processes at once: a thread waits for each, and all are ended when one of them raises or is interrupted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
MEANWHILE_S = 30.0
Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """`jobs` threads. `stopped` is set once their processes were ended for another reason than their own."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.stopped = jobs, threading.Event()
        self._sessions, self._lock = set[int](), threading.Lock()
        self._threads = threading.local()

    def each(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        meanwhile: Callable[[], Any] | None = None,
    ) -> list[Result]:
        """The results in the order of the tasks, which begin in turn; `meanwhile` is called every MEANWHILE_S s.

        A task's own tasks run one by one in its thread: there are never more than `jobs` at once.
        """
        if hasattr(self._threads, "is_busy"):
            return [function(task) for task in tasks if not self.stopped.is_set()]
        with ThreadPoolExecutor(self.jobs, initializer=setattr, initargs=(self._threads, "is_busy", True)) as pool:
            futures = [pool.submit(function, task) for task in tasks]
            try:
                left = set(futures)
                while left:
                    done, left = wait(left, MEANWHILE_S, FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    if meanwhile:
                        meanwhile()
                return [future.result() for future in futures]
            except BaseException:
                self.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                with self._lock:
                    for session in self._sessions:
                        end(session)
                raise

    @contextlib.contextmanager
    def process(self, command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A command in the repository's root; it ends with the block."""
        with (
            subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options) as process,
            self.session(process.pid),
        ):
            yield process

    def call(self, function: Callable[..., Result], *arguments: Any, limit_s: float | None = None) -> Result:
        """The result of a function in a process of its own, which imports the function's module.

        Errors: TimeoutError after so many seconds, and the function's own.
        """
        # JAX starts in no process that is forked.
        with (
            ProcessPoolExecutor(1, get_context("spawn"), initializer=os.setsid) as pool,
            self.session(pool.submit(os.getpid).result()),
        ):
            return pool.submit(function, *arguments).result(limit_s)

    @contextlib.contextmanager
    def session(self, pid: int) -> Iterator[None]:
        """A process that leads a session: it ends, with all that it started, when the block ends or the others do."""
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
