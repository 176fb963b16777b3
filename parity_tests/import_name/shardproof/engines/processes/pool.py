"""The process engines gloo and nccl: a persistent pool of ranks per world size, forked from a server with torch.

The first run that needs the server or a pool starts it, and it stays. A pool with any failure is killed and forked anew
for its next run, never repaired. All of these processes end with the parent, however it ends. An idle gloo pool is
suspended: each of its groups would poll for messages 200 times a second, and a rank has dozens.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.declare.travel import dumps
from shardproof.engines.creation import without_creations
from shardproof.engines.failure import NotRun
from shardproof.engines.ledger import Ledger, RunResult
from shardproof.engines.lockstep.rank_globals import import_ahead, imported_by, imports_of
from shardproof.engines.processes import forks
from shardproof.engines.processes.forks import ForkServer, shared_packages
from shardproof.engines.processes.root_cause import find_root_cause
from shardproof.engines.processes.status_table import StatusTable
from shardproof.engines.processes.watch import RankHandle, Watch

IDLE_S = 0.5  # after so long without a run the ranks are suspended

_lock = threading.Lock()
_suspender: threading.Thread | None = None
_server: ForkServer | None = None
_pools: dict[tuple[int, str], Pool] = {}


def run(fn: Callable[[Any, CaseSpec], Any], case: CaseSpec, backend: str = "gloo", quiet_s: float = 10.0) -> RunResult:
    """Run `fn(mesh, case)` on each rank of `case.mesh`, in processes.

    `fn` travels by value, once per pool; results come back pickled. `quiet_s` is the longest time without progress
    while a rank computes; while all ranks wait it is 1.5 s.

    Errors: RankFailure, one subclass per cause; NotRun if backend is nccl and there is no GPU; TypeError for a function
    that cannot be pickled.
    """
    if backend == "nccl" and not torch.cuda.device_count():
        raise NotRun("nccl needs a GPU, none is here")
    import_ahead(fn)
    file = discover.file_of(fn)
    function = dumps(fn, file_is_imported=file is not None), file
    packages = shared_packages(() if file is None else imports_of(fn))
    with _lock:
        try:
            pool = _pool(case.world, backend)
            pool.end_if_outdated({} if file is None else _versions(fn))
            return pool.run(function, case, quiet_s, packages, setup_key_of(fn, case))
        finally:
            _suspend_when_idle()


def setup_key_of(fn: Callable[..., Any], case: CaseSpec) -> object:
    """The key of ranks with a `setup`: they serve one function and one mesh; None for a function without one."""
    setup_key = getattr(fn, "setup_key", None)
    return None if setup_key is None else (setup_key, tuple(case.mesh.items()))


def _versions(fn: Any) -> dict[str, tuple[int, int]]:
    """The current versions of the files that ranks import for a function: its own, and user files that it imports."""
    home = getattr(fn, "fn", fn).__module__
    files = {getattr(sys.modules[name], "__file__", None) for name in imported_by(home)}
    stats = {file: Path(file).stat() for file in files if file is not None and Path(file).is_file()}
    return {file: (stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()}


def renew(world: int) -> None:
    """End the gloo ranks of this size and all their state; the next run forks new ones."""
    with _lock:
        if (world, "gloo") in _pools:
            _pools[world, "gloo"].kill()


def start_ahead() -> None:
    """Start the server early, while this process does other work before its first run."""
    if _server is None:
        forks.start_ahead()


def close() -> None:
    """End all pools and the server. The next run starts them again."""
    global _server
    server, _server = _server, None
    for pool in _pools.values():
        pool.drop()
    _pools.clear()
    if server is not None:
        server.close()


def pids() -> list[int]:
    """The server and all ranks that it has forked."""
    return [] if _server is None else [_server.pid, *(pid for pool in _pools.values() for pid in pool.pids)]


def _pool(world: int, backend: str) -> Pool:
    global _server
    if _server is not None and not _server.is_alive:
        close()
    if _server is None:
        _server = forks.server()
    return _pools.setdefault((world, backend), Pool(world, backend, _server))


def _suspend_when_idle() -> None:
    global _suspender
    if _suspender is None:
        _suspender = threading.Thread(target=_suspend_idle_pools, daemon=True)
        _suspender.start()


def _suspend_idle_pools() -> None:
    """Check the pools periodically until all are suspended."""
    global _suspender
    running = True
    while running:
        time.sleep(IDLE_S / 2)
        with _lock:
            pools = list(_pools.values())
            for pool in pools:
                pool.suspend(idle_s=IDLE_S)
            running = any(pool.is_running for pool in pools)
            if not running:
                _suspender = None


def _forget() -> None:
    """In a forked child of this process: forget the pools, which belong to the parent."""
    global _server, _lock, _suspender
    _lock, _suspender = threading.Lock(), None
    server, _server = _server, None
    for pool in _pools.values():
        pool.drop()
    _pools.clear()
    if server is not None:
        server.forget()


atexit.register(close)
os.register_at_fork(after_in_child=_forget)


class Pool:
    """The ranks of one world size; `generation` counts how often they were forked."""

    def __init__(self, world: int, backend: str, server: ForkServer) -> None:
        self.world, self.backend, self.generation = world, backend, 0
        self._server = server
        self._handles: list[RankHandle] = []
        self._table: StatusTable | None = None
        self._sent_keys: set[str] = set()
        self._setup_key: object = None
        self._packages: frozenset[str] = frozenset()
        self._versions: dict[str, tuple[int, int]] = {}  # of files that its ranks may have imported
        self._last_run, self._is_suspended = 0.0, False

    @property
    def is_running(self) -> bool:
        return bool(self._handles) and self.backend == "gloo" and not self._is_suspended

    @property
    def pids(self) -> list[int]:
        return [handle.pid for handle in self._handles]

    def run(
        self,
        function: tuple[bytes, str | None],
        case: CaseSpec,
        quiet_s: float,
        packages: frozenset[str],
        setup_key: object = None,
    ) -> RunResult:
        """Run one job. `function` is a pickle and the file to import before it; the ranks may need `packages`."""
        has_ended = self._tell_ended()
        # Ranks without state are forked anew if each would have to import a package that the server can import once.
        lacks_packages = setup_key is None and not packages <= self._packages
        if setup_key != self._setup_key or has_ended or lacks_packages:
            self.kill()
        self._setup_key = setup_key
        self._resume()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.kill)
            table = self._table or self._fork(packages)
            start = time.monotonic()
            self._send(function, case)
            outcomes, quiet = Watch(self._handles, self._server, table).outcomes(quiet_s)
            seconds = time.monotonic() - start
            failure = find_root_cause(outcomes, case, quiet)
            if failure is not None:
                raise failure
            on_failure.pop_all()
        self._last_run = time.monotonic()
        ledger = Ledger(without_creations([row for outcome in outcomes for row in outcome.rows]))
        return RunResult(tuple(cloudpickle.loads(outcome.result) for outcome in outcomes), ledger, seconds)

    def end_if_outdated(self, versions: dict[str, tuple[int, int]]) -> None:
        """End the ranks if they have imported another version of a file: a rank imports each once."""
        if any(self._versions.get(file, version) != version for file, version in versions.items()):
            self.kill()
            self._versions.clear()
        self._versions |= versions

    def _tell_ended(self) -> bool:
        """Whether a rank has ended since the last run; a line on stderr says how, since no verdict will."""
        ended = [handle for handle in self._handles if self._server.exit_code(handle.pid) is not None]
        for handle in ended:
            assert self._table is not None  # it lives as long as the ranks
            dead = handle.traces.dead(self._table, self._server.exit_code(handle.pid))
            print(f"shardproof: between two examples {dead}; all ranks were started again", file=sys.stderr)
        return bool(ended)

    def suspend(self, idle_s: float = 0.0) -> None:
        """Use no CPU time until the next run if the last ended `idle_s` ago; gloo only, NCCL's watchdog forbids it."""
        if self.is_running and time.monotonic() - self._last_run >= idle_s:
            self._server.suspend(self.pids)
            self._is_suspended = True

    def _resume(self) -> None:
        if self._is_suspended:
            self._server.resume(self.pids)
            self._is_suspended = False

    def kill(self) -> None:
        self._server.kill(self.pids)
        self.drop()

    def drop(self) -> None:
        """Close the connections to the ranks, which ends any rank that is still alive."""
        for handle in self._handles:
            handle.close()
        if self._table is not None:
            self._table.close()
        self._handles, self._table, self._is_suspended = [], None, False

    def _fork(self, packages: frozenset[str]) -> StatusTable:
        self.generation += 1
        self._sent_keys.clear()
        self._packages = packages
        self._server.import_ahead(packages)
        folder = tempfile.mkdtemp(prefix=f"{self.backend}{self.world}_", dir=self._server.folder)
        self._table = StatusTable(Path(folder) / "status", self.world)
        for rank in range(self.world):
            handle = self._server.fork(rank=rank, world=self.world, backend=self.backend, folder=folder)
            self._handles.append(RankHandle(rank, *handle, folder))
        return self._table

    def _send(self, function: tuple[bytes, str | None], case: CaseSpec) -> None:
        pickled, file = function
        key = hashlib.sha256(pickled).hexdigest()
        fresh = key not in self._sent_keys
        self._sent_keys.add(key)
        path = [entry or os.getcwd() for entry in sys.path]
        for handle in self._handles:
            with contextlib.suppress(OSError):  # the rank has just died; the watch will notice
                handle.work.send((key, pickled if fresh else None, file, path, case.json))
