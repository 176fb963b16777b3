"""The lockstep engine: every rank is a thread of this process, one runs at a time, and their order is deterministic.

A session holds the threads, groups and DeviceMeshes for one mesh and runs one example after another. After a failure it
is discarded. Threads cannot be killed: a rank in an endless loop is reported and interrupted at its next Python
instruction; a thread inside a C call is abandoned.

Each rank has its own copy of the globals of the scheme's modules (see rank_globals.py). Blind spot: ranks share the
globals of libraries and the generators of Python and NumPy (each rank has its own generator of torch). In the process
engines ranks share nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c_api
from torch.distributed.device_mesh import init_device_mesh

from shardproof.declare.case import CaseSpec
from shardproof.endings import exits
from shardproof.engines import compiling, creation, futures, node_lines, process_limits
from shardproof.engines.ledger import RunResult, is_plumbing
from shardproof.engines.lockstep import compile_lock, device_guard, group, last_seen, opening, world
from shardproof.engines.lockstep.exchange import Exchange
from shardproof.engines.lockstep.rank_globals import Namespace, import_ahead, namespaces_of
from shardproof.engines.lockstep.scheduler import Halt, Scheduler
from torch_impl.collectives.mesh import MeshView

Job = Callable[[Any, CaseSpec], Any]

_one_run = threading.Lock()
_sessions: dict[Hashable, Session] = {}
_MOST_SESSIONS = 16


def run(fn: Job, case: CaseSpec, *, quiet_s: float = 60.0) -> RunResult:
    """Run `fn(mesh, case)` on each rank of `case.mesh`; `quiet_s` bounds the seconds between two collectives.

    Errors: RuntimeError if another run is active in this process; RankFailure, one subclass per cause.
    """
    if not _one_run.acquire(blocking=False):
        raise RuntimeError("lockstep.run: another run is going on in this process; use engine='gloo'")
    try:
        last_seen.runs(case)
        import_ahead(fn)
        device_guard.keep()
        process_limits.install()
        with ExitStack() as changed:
            for change in (
                world.installed(group.create),
                node_lines.kept(),
                futures.observed(),
                compile_lock.installed(),
                opening.in_separate_buffers(),
                _shared_propagation(),
                _raised_exits(),
            ):
                changed.enter_context(change)
            return _session(fn, case, quiet_s).run(fn, case, quiet_s)
    finally:
        _one_run.release()


def _shared_propagation() -> AbstractContextManager[None]:
    """Share DTensor's propagation between ranks if DTensor has been imported; importing it would take a second."""
    if "torch.distributed.tensor" not in sys.modules:
        return nullcontext()
    from shardproof.engines.lockstep import propagation

    return propagation.shared()


@contextmanager
def _raised_exits() -> Iterator[None]:
    """Make `os._exit` end only the rank that calls it, as if the rank were a process.

    Else this process would end with the rank's status and without a verdict. A process that a rank forks still exits.
    """
    if exits.are_installed():
        yield
        return
    leave, process = os._exit, os.getpid()

    def end_rank(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread().name.startswith(exits.RANK_THREAD):
            raise SystemExit(f"os._exit({status}), which ends a rank's process")
        leave(status)

    os._exit = end_rank
    try:
        yield
    finally:
        os._exit = leave


def _session(fn: Job, case: CaseSpec, quiet_s: float) -> Session:
    """The session of this mesh; a job with its own `setup` has a session to itself."""
    key = tuple(case.mesh.items()), getattr(fn, "setup_key", None)
    session = _sessions.pop(key, None)
    if session is None:
        if len(_sessions) >= _MOST_SESSIONS:
            _sessions.pop(next(iter(_sessions))).close()
        session = Session(key, fn, case, quiet_s)
    _sessions[key] = session
    return session


def forget_sessions() -> None:
    """Forget all sessions in a forked process. It has none of their threads; the next run of a mesh starts new ones."""
    _sessions.clear()


class Session:
    """The threads of one mesh."""

    def __init__(self, key: tuple[Hashable, Hashable], fn: Job, case: CaseSpec, quiet_s: float) -> None:
        self._key, self._axes = key, dict(case.mesh)
        self._scheduler = Scheduler(case.world)
        self._exchange = Exchange(self._scheduler, self._axes)
        self._store = c_api.HashStore()
        self._worlds = [world.RankWorld(self._exchange, rank) for rank in range(case.world)]
        self._meshes: list[Any] = [None] * case.world
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"{exits.RANK_THREAD}{rank}", daemon=True)
            for rank in range(case.world)
        ]
        for thread in self._threads:
            thread.start()
        self._all_ranks(self._build, case.replace(schedule=0), quiet_s)
        if key[1] is not None:
            set_up = partial(self._set_up, fn)
            self._all_ranks(set_up, case.replace(schedule=0), quiet_s, namespaces_of(fn))

    def run(self, fn: Job, case: CaseSpec, quiet_s: float) -> RunResult:
        """One example; a failure ends the session."""
        try:
            return self._all_ranks(fn, case, quiet_s, namespaces_of(fn))
        except BaseException:
            _sessions.pop(self._key, None)
            raise

    def close(self) -> None:
        """End the threads, except one that is stuck."""
        self._scheduler.dismiss()
        for rank, thread in enumerate(self._threads):
            if self._scheduler.finished[rank] or rank != self._scheduler.running:
                thread.join(1.0)

    def _all_ranks(
        self, fn: Job, case: CaseSpec, quiet_s: float, namespaces: dict[str, Namespace] | None = None
    ) -> RunResult:
        # 1. Lay out the example for the rank threads, which sleep in `Scheduler.enter`.
        started = time.perf_counter()
        output = sys.stdout, sys.stderr
        self._job, self._case = fn, case
        self._results: list[Any] = [None] * self._scheduler.world
        self._exchange.reset(case)
        self._scheduler.globals.begin(namespaces or {})
        # 2. Give the first turn; from now on one rank thread runs at a time.
        seeds = [rank_seed(case, rank) for rank in range(case.world)]
        self._scheduler.begin(case.schedule, seeds, self._exchange.stuck)
        # 3. Sleep until all ranks have left. A failure ends the session: its threads cannot be used again.
        try:
            try:
                self._await(quiet_s)
            finally:
                last_seen.beat(0.0)
            failure = self._scheduler.failure or creation.difference(case, self._exchange.ledger)
            if failure is not None:
                raise failure
        except BaseException:
            self.close()
            if self._scheduler.failure is None and not self._scheduler.finished[self._scheduler.running]:
                self._halt()  # after an interrupt, a rank in a loop would go on beside the next run
            raise
        finally:
            self._scheduler.globals.end()
            # Ranks redirect the output in turns, and the last one to restore it may restore another rank's stream.
            sys.stdout, sys.stderr = output
        self._exchange.ledger.rows[:] = creation.without_creations(self._exchange.ledger.rows)
        return RunResult(tuple(self._results), self._exchange.ledger, time.perf_counter() - started)

    def _await(self, quiet_s: float) -> None:
        """Wait until all ranks have left. If a rank makes no progress for `quiet_s`, the run fails as stalled.

        A rank inside torch.compile may take longer. If a rank holds the interpreter in native code, this thread does
        not run. The parent of the command then gets no beats, and ends this process.
        """
        moves, moved, since, is_compiling = -1, 0.0, 0.0, False
        last_seen.beat(quiet_s)
        while not self._scheduler.over(min(quiet_s, 0.25)):
            last_seen.beat(quiet_s)
            now = time.monotonic()
            if self._scheduler.moves != moves:
                moves, moved, since, is_compiling = self._scheduler.moves, now, now, False
                continue
            if not is_compiling and now - since < quiet_s:
                continue
            thread = self._threads[self._scheduler.running].ident or 0
            is_compiling = now - moved < compiling.LIMIT_S and compiling.is_compiling(thread)
            if is_compiling:
                since = now  # the limit starts after the compiler
            elif now - since >= quiet_s and self._scheduler.moves == moves:  # it may have moved meanwhile
                stalled = self._exchange.stalled(_users_stack(thread), quiet_s)
                self._scheduler.failure = self._scheduler.failure or stalled
                self._halt()
                return

    def _halt(self) -> None:
        """Interrupt the running rank at its next Python instruction. A rank inside a C call is abandoned."""
        thread = self._threads[self._scheduler.running].ident or 0
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Halt))

    # The methods below run in the ranks' threads.

    def _serve(self, rank: int) -> None:
        world.enter(self._worlds[rank])
        torch.autograd.set_multithreading_enabled(False)
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        while self._example(rank):
            pass
        try:
            if world.is_installed():  # else the run is over, and c10d's names belong to the process again
                self._exchange.drop(rank)
                c_api._unregister_all_process_groups()
        finally:
            self._scheduler.leave(rank)

    def _example(self, rank: int) -> bool:
        """Take part in one run; False if this thread must end."""
        try:
            self._scheduler.enter(rank)
            torch.set_grad_enabled(True)  # whatever the last example left
            torch.set_autocast_enabled("cpu", False)
            self._results[rank] = self._job(self._meshes[rank], self._case)
            self._exchange.settle(rank)
            self._worlds[rank].restore(self._meshes[rank] and self._meshes[rank].device_mesh)
        except Halt:
            return False
        except BaseException as error:
            self._exchange.raised(rank, error)
            return False
        self._scheduler.leave(rank)
        return True

    def _build(self, mesh: None, case: CaseSpec) -> None:
        """The first job of each thread: default group and mesh."""
        rank = self._worlds.index(world.here())
        dist.init_process_group(world.BACKEND, store=self._store, rank=rank, world_size=case.world)
        device_mesh = init_device_mesh("cpu", tuple(self._axes.values()), mesh_dim_names=tuple(self._axes))
        self._meshes[rank] = MeshView(device_mesh)
        self._worlds[rank].mark()

    def _set_up(self, fn: Any, mesh: MeshView, case: CaseSpec) -> None:
        """The second job of a session with a `setup`: groups that it makes belong to the session, like the mesh's."""
        fn.prepare(mesh, case)
        world.here().mark()


def _users_stack(thread: int) -> str:
    """The stack of a thread from its first user frame on."""
    frames = traceback.extract_stack(sys._current_frames().get(thread))
    first = next((i for i, frame in enumerate(frames) if not is_plumbing(frame.filename)), 0)
    return "".join(traceback.format_list(frames[first:])).rstrip()


def rank_seed(case: CaseSpec, rank: int) -> int:
    """The seed of a rank's default generator; each rank has its own seed."""
    return case.seed + rank
