"""Several processes at once: a thread waits for each, and all are ended when one of them raises or is interrupted.

They end with this process, too, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from shardproof.engines.processes import orphans

ROOT = Path(__file__).resolve().parents[2]
MEANWHILE_S = 30.0
Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """`jobs` threads. `stopped` is set once their processes were ended for another reason than their own."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.stopped = jobs, threading.Event()
        self._ends, self._lock = dict[int, Callable[[], Any]](), threading.Lock()
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
                    for end in self._ends.values():
                        _call(end)
                raise

    @contextlib.contextmanager
    def process(self, command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
        """A command in the repository's root; it ends with the block."""
        with (
            subprocess.Popen(orphans.kept(command), cwd=ROOT, start_new_session=True, **options) as process,
            self._ending(process.pid, process.terminate),
        ):
            yield process

    def call(self, function: Callable[..., Result], *arguments: Any, limit_s: float | None = None) -> Result:
        """The result of a function in a process of its own, which imports the function's module.

        Errors: TimeoutError after so many seconds, and the function's own.
        """
        # JAX starts in no process that is forked.
        with (
            ProcessPoolExecutor(1, get_context("spawn"), initializer=_lead, initargs=(os.getpid(),)) as pool,
            self.session(pool.submit(os.getpid).result()),
        ):
            return pool.submit(function, *arguments).result(limit_s)

    @contextlib.contextmanager
    def session(self, pid: int) -> Iterator[None]:
        """A process that leads a session: it ends, with all that it started, when the block ends or the others do."""
        with self._ending(pid, partial(os.killpg, pid, signal.SIGKILL)):
            yield

    @contextlib.contextmanager
    def _ending(self, pid: int, end: Callable[[], Any]) -> Iterator[None]:
        with self._lock:
            self._ends[pid] = end
        try:
            if self.stopped.is_set():
                _call(end)
            yield
        finally:
            with self._lock:
                del self._ends[pid]
            _call(end)


def _call(end: Callable[[], Any]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        end()


def _lead(parent: int) -> None:
    """In a process that a thread of `parent` has started: lead a session, and end with that thread."""
    os.setsid()
    orphans.tie(parent)
