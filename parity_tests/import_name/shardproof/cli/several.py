"""Verify schemes in parallel, each in the next free process: most of the time is spent tracing references.

A worker imports the file that declares a scheme, verifies it like `shardproof verify --profile quick`, and returns its
outcome. It takes the other schemes of that file too, unless another worker has nothing left to do. A worker that dies
costs its scheme alone, and another takes its place.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Container, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shardproof.cli import session
from shardproof.declare import discover
from shardproof.declare.declared import Declared
from shardproof.endings import exits
from shardproof.endings.exit_status import RANK_FAILED
from shardproof.endings.raised import pass_interrupt
from shardproof.engines.collector import collect_rarely
from shardproof.engines.last_act import flush
from shardproof.engines.processes import crash, orphans
from shardproof.engines.processes.root_cause import ending
from shardproof.judge import bridge
from shardproof.report.guard import sentence_of

MOST = 4  # processes; each holds torch and JAX
END_S = 10.0  # the time for a worker without work to end


class Workers:
    """The processes, and the folder in which each notes its last words."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder, self.count = folder, count
        self._all = [_Worker(folder) for _ in range(count)]

    def outcomes(self, schemes: Sequence[Declared], examples: int) -> Iterator[tuple[Declared, session.Outcome]]:
        """Each scheme with its outcome, in the order in which they end."""
        waiting = list(schemes)
        busy: list[_Worker] = []
        while waiting or busy:
            for worker in self._all:
                if waiting and worker not in busy:
                    others = set[str]().union(*(each.files for each in self._all if each is not worker))
                    worker.take(next_scheme(waiting, worker.files, others), examples)
                    busy.append(worker)
            ready = wait([worker.connection for worker in busy])
            for worker in [each for each in busy if each.connection in ready]:
                busy.remove(worker)
                scheme, outcome = worker.scheme, worker.outcome()
                if outcome is None:
                    outcome = worker.died()
                    self._all.remove(worker)
                    if waiting:
                        self._all.append(_Worker(self._folder))
                yield scheme, outcome

    def close(self) -> None:
        for worker in self._all:
            worker.close()


def next_scheme(waiting: list[Declared], own: Container[str], others: Container[str]) -> Declared:
    """Remove and return the first scheme of a file in `own`; if there is none, of a file that is not in `others`.

    `own` are the files that a worker has imported, `others` the files of the other workers.
    """
    of_own = (scheme for scheme in waiting if scheme.file in own)
    of_new = (scheme for scheme in waiting if scheme.file not in others)
    scheme = next(of_own, None) or next(of_new, waiting[0])
    waiting.remove(scheme)
    return scheme


@contextlib.contextmanager
def workers() -> Iterator[Workers]:
    """Processes that import torch and JAX while the caller finds the schemes; they end on leaving."""
    with tempfile.TemporaryDirectory() as folder:
        started = Workers(folder, max(min(MOST, os.cpu_count() or 1), 1))
        try:
            yield started
        finally:
            started.close()


def verified(schemes: Sequence[Declared], examples: int, started: Workers) -> session.Outcome:
    """The outcomes of all schemes in the given order, with a progress bar on standard error."""
    by_key: dict[str, session.Outcome] = {}
    with session.progress_bar() as bar:
        task = bar.add_task("", total=len(schemes))
        for scheme, outcome in started.outcomes(schemes, examples):
            by_key[scheme.key] = outcome
            bar.update(task, advance=1, description=scheme.name)
    total = session.Outcome(processes=started.count)
    for scheme in schemes:
        total.add(by_key[scheme.key])
    return total


class _Worker:
    """The parent's end of one process, the scheme that it verifies, and the files that it has imported."""

    def __init__(self, folder: str) -> None:
        self.files: set[str] = set()
        self._is_busy = True  # with its imports
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._log = Path(tempfile.mkdtemp(dir=folder))
        self._process = context.Process(target=_serve, args=(theirs, str(self._log), os.getpid()))
        self._process.start()
        theirs.close()

    def take(self, scheme: Declared, examples: int) -> None:
        self.scheme, self._is_busy = scheme, True
        self.files.add(scheme.file)
        with contextlib.suppress(OSError):  # it has just died, which `outcome` will notice
            self.connection.send((scheme.file, scheme.name, scheme.key, examples))

    def outcome(self) -> session.Outcome | None:
        """The outcome of its scheme; None if the process has died."""
        try:
            outcome: session.Outcome = self.connection.recv()
        except (EOFError, OSError):
            return None
        self._is_busy = False
        return outcome

    def died(self) -> session.Outcome:
        """The outcome of a scheme whose process has died."""
        self._process.join(END_S)
        noted = crash.stack(self._log / "noted")
        line = crash.line(crash.stack(self._log / "crash"))
        at = f" by {noted}" if noted else f" at {line}" if line else ""
        outcome = session.Outcome()
        how = f"its process {ending(self._process.exitcode)}{at}"
        outcome.reject(self.scheme.key, f"scheme '{self.scheme.name}': {how}", RANK_FAILED)
        self.close()
        return outcome

    def close(self) -> None:
        """End the process: kill it if it is at work; an idle one ends by itself."""
        self.connection.close()
        self._process.join(0.0 if self._is_busy else END_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(END_S)


def _serve(connection: Connection, log: str, parent: int) -> None:
    """The loop of a worker: verify schemes until the parent has no more."""
    orphans.tie(parent)
    collect_rarely()
    crash.record(Path(log) / "crash")
    exits.install(lambda text: Path(log, "noted").write_text(text, encoding="utf-8"))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        bridge.start()
        while True:
            connection.send(_verify_one(*connection.recv()))
    # An ordinary exit would free the heap of torch, JAX and all schemes: the parent would wait three seconds for it.
    atexit._run_exitfuncs()
    flush()
    exits.leave(0)


def _verify_one(file: str, name: str, key: str, examples: int) -> session.Outcome:
    try:
        scheme = next(candidate for candidate in discover.schemes_of_file(file) if candidate.name == name)
        return session.run([scheme], session.VerifyOptions(examples=examples, profile="quick", quiet=True))
    except BaseException as error:
        pass_interrupt(error)
        outcome = session.Outcome()
        status, sentence = sentence_of(error)
        outcome.reject(key, f"scheme '{name}': {sentence}", status)
        return outcome
