"""A rank in its own process: its groups, its meshes, its functions, and one run of a function."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.endings import exits
from shardproof.endings.raised import message_of, printable
from shardproof.engines import creation, futures, node_lines, process_limits, threads
from shardproof.engines.compiling import is_compiling
from shardproof.engines.failure import GROUP_HINT, RankFailure, RankFault, raised_by_function
from shardproof.engines.ledger import LedgerRow, line_of_thread, raised_at
from shardproof.engines.lockstep.world import flattened
from shardproof.engines.modes import outside_modes
from shardproof.engines.processes import rank_warnings, status_table
from shardproof.engines.processes.recorder import OfThread, Recorder, observe_waits
from shardproof.engines.processes.root_cause import DONE, RAISED, Outcome
from shardproof.engines.processes.traces import Traces
from torch_impl.collectives import MeshView

BACKEND_TIMEOUT_S = 30  # a last resort, far longer than any limit of the harness
MANY_GROUPS = 16  # created by a function, each with sockets

# key, function if new, the file to import before it, sys.path, case
Job = tuple[str, bytes | None, str | None, Sequence[str], str]

_current: Recorder | None = None
_threads = ExitStack()  # for as long as this process runs


class Rank:
    """One member of the default group.

    Functions are kept by key and meshes by shape; groups that a job creates are not kept.
    """

    def __init__(
        self, slot: status_table.Slot, backend: str, store: dist.Store, rank: int, world: int, gpu: int
    ) -> None:
        self._slot, self.rank = slot, rank
        self._device = "cuda" if backend == "nccl" else "cpu"
        self._gpu = gpu
        self._settle()
        wait = timedelta(seconds=BACKEND_TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
        self._functions: dict[str, Callable] = {}
        self._meshes: dict[tuple, MeshView] = {}
        self._permanent_groups = _groups()
        self._setup_key: object = None

    def run(self, job: Job, ready: Callable[[], object]) -> Outcome:
        """Run one job; `ready` is called once function and mesh exist, so that a slow import is not a stall."""
        key, function, file, path, text = job
        self._settle()
        try:
            if function is not None:
                sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
                with rank_warnings.not_shown():  # the parent has shown the warnings of this import
                    if file is not None:
                        discover.import_on_rank(file)
                    self._functions[key] = cloudpickle.loads(function)
        except Exception as error:
            return _raised(self.rank, Recorder(), error)
        with outside_modes():  # the import may have left one on
            return self._called(self._functions[key], text, ready)

    def _called(self, function: Callable, text: str, ready: Callable[[], object]) -> Outcome:
        try:
            case = CaseSpec.from_json(text)
            mesh = self._mesh(case)
        except Exception as error:
            return _raised(self.rank, Recorder(), error)
        self._slot.issue(None, status_table.COMPUTING)
        ready()
        with process_limits.restored():
            outcome = self._set_up(function, mesh, case)
            if outcome is None or outcome.kind == DONE:
                outcome = attempt(function, mesh, case, self._slot)
        self._slot.enter(status_table.FINISHED)
        return outcome

    def _set_up(self, function: Any, mesh: MeshView, case: CaseSpec) -> Outcome | None:
        """Run the function's `setup`, unless this rank was last set up for the same function and mesh.

        A pool's rank serves one setup key, so it does this once; a rank of torchrun cannot be restarted.
        """
        setup_key = getattr(function, "setup_key", None)
        key = setup_key and (setup_key[0], getattr(setup_key[1], "__code__", setup_key[1]), tuple(case.mesh.items()))
        if key is None or key == self._setup_key:
            return None
        outcome = attempt(function.prepare, mesh, case, self._slot)
        if outcome.kind == DONE:
            self._setup_key = key
            self._permanent_groups |= _groups()
        return outcome

    def _settle(self) -> None:
        """Apply settings that torch keeps per thread."""
        torch.set_num_threads(1)
        torch.autograd.set_multithreading_enabled(False)
        if self._device == "cuda":
            torch.cuda.set_device(self._gpu)

    def _mesh(self, case: CaseSpec) -> MeshView:
        # Axes that a job flattened belong to their mesh, which serves other jobs.
        self._permanent_groups |= {group for view in self._meshes.values() for group in flattened(view.device_mesh)}
        # The last jobs' groups hold sockets; only now has every rank left them.
        for group in _abandoned(list(_groups() - self._permanent_groups)):
            dist.destroy_process_group(group)
        shape = tuple(case.mesh.items())
        if shape not in self._meshes:
            names, sizes = zip(*shape, strict=True)
            self._meshes[shape] = MeshView(init_device_mesh(self._device, sizes, mesh_dim_names=names))
            self._permanent_groups |= _groups()
        return self._meshes[shape]


def attempt(fn: Callable, mesh: MeshView, case: CaseSpec, slot: status_table.Slot | None = None) -> Outcome:
    """Call `fn(mesh, case)` under a recorder; returns an outcome in every case."""
    global _current
    rank = dist.get_rank()
    torch.manual_seed(case.seed + rank)
    with Recorder(slot, case.mesh) as recorder:
        _current = recorder
        try:
            returned = fn(mesh, case)
            if mesh.device_mesh.device_type == "cuda":
                torch.cuda.synchronize()  # failing kernels and endless collectives belong to this function
            result = cloudpickle.dumps(returned)
        except BaseException as error:
            return _raised(rank, recorder, error)
        finally:
            _current = None
            futures.forget()
    for error in recorder.thread_errors:
        return _raised(rank, recorder, error)
    unwaited = recorder.unwaited()
    rows = tuple(replace(row, unwaited=True) if row in unwaited else row for row in recorder.rows)
    return Outcome(rank, DONE, rows, result)


def observe() -> None:
    """Once per process: report waits, threads and the creation of groups to the current recorder."""
    observe_waits(lambda: _current)
    _threads.enter_context(threads.thread_owners(_owner))
    _threads.enter_context(node_lines.kept())
    _threads.enter_context(futures.observed(lambda: (owner := _owner()) and owner[0]))
    make = getattr(dist.distributed_c10d, creation.MAKER)
    setattr(dist.distributed_c10d, creation.MAKER, creation.reported(make, _creations))


def _owner() -> threads.Owner | None:
    recorder = _current
    return None if recorder is None else (partial(OfThread, recorder), recorder.thread_errors.append)


def _creations() -> tuple[Counter[str], creation.Issue] | None:
    recorder = _current
    return None if recorder is None else (recorder.creations, recorder.creation)


def rows_so_far() -> tuple[LedgerRow, ...]:
    recorder = _current
    return tuple(recorder.rows) if recorder is not None else ()


def _groups() -> set[dist.ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)


def _abandoned(groups: list[Any]) -> list[dist.ProcessGroup]:
    """Groups that nobody can use any more: a function may keep a group in a global, as training code does.

    An abandoned group has no reference outside torch's own tables, and no DeviceMesh, which stores its groups' names,
    lists it.
    """
    if not groups:
        return []
    if len(groups) > MANY_GROUPS:  # free groups in reference cycles
        gc.collect()
    tables = [table for table in vars(dist.distributed_c10d).values() if isinstance(table, dict)]
    named = {name for each in gc.get_objects() if type(each) is DeviceMesh for name in _names_in(each)}
    compared = [*groups, object()]  # the last is a probe: only this list refers to it
    groups.clear()
    references = [sys.getrefcount(compared[i]) - _count_in(tables, compared[i]) for i in range(len(compared))]
    return [
        group
        for group, count in zip(compared[:-1], references, strict=False)
        if count == references[-1] and group.group_name not in named
    ]


def _count_in(tables: Sequence[dict[Any, Any]], group: object) -> int:
    """How often torch's tables refer to a group: as a key, and in lists of groups."""
    as_keys = sum(group in table for table in tables)
    lists = [value for table in tables for value in table.values() if isinstance(value, list)]
    return as_keys + sum(each is group for each_list in lists for each in each_list)


def _names_in(mesh: DeviceMesh) -> Sequence[str]:
    return getattr(mesh, "_dim_group_names", ())


def _raised(rank: int, recorder: Recorder, raised: BaseException) -> Outcome:
    error = raised_by_function(raised)
    is_of_group = isinstance(error, AttributeError) and isinstance(error.obj, dist.ProcessGroup)
    hint = f"; {GROUP_HINT}" if is_of_group else _in_c10d(error)  # a group of lockstep includes the sentence itself
    return Outcome(
        rank,
        RAISED,
        tuple(recorder.rows),
        error=str(error)
        if isinstance(error, RankFault)
        else f"{type(error).__name__}: {message_of(error)}{hint}".removesuffix(": "),
        is_sentence=isinstance(error, RankFault),
        cause=error.cause if isinstance(error, RankFailure) else "raised",
        source=raised_at(error) or (recorder.rows[-1].source if recorder.rows else None),
        trace=printable("".join(traceback.format_exception(raised))),
        from_backend=recorder.is_backends(error),
    )


def _in_c10d(error: BaseException) -> str:
    """` (in send)` of an error that a function of c10d raised, before the backend that the recorder sees."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not codes or codes[-1].co_filename != dist.distributed_c10d.__file__:
        return ""
    called = (code.co_name for code in codes if code.co_filename == dist.distributed_c10d.__file__)
    return f" (in {next(called)})"


def main(work_fd: int, control_fd: int, *, rank: int, world: int, backend: str, folder: str) -> None:
    """The main loop of a rank in a pool, with two sockets to the parent.

    The first carries jobs and outcomes. On the second a separate thread reports the rows issued so far, even while the
    main thread hangs, and ends the process when the parent is gone.
    """
    work = Connection(work_fd)
    threading.Thread(target=_answer, args=(Connection(control_fd),), daemon=True).start()
    observe()
    rank_warnings.show_once(str(Path(folder).parent))  # of all pools: a failing case runs again in new pools
    Traces(folder, rank).begin()
    slot = status_table.StatusTable(Path(folder) / "status", world).slot(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    member = Rank(slot, backend, store, rank, world, gpu_of(rank, world) if backend == "nccl" else 0)
    try:
        while True:
            work.send(member.run(work.recv(), ready=lambda: work.send("ready")))
    except (EOFError, ConnectionError):
        _end()  # the parent has closed the connection


def gpu_of(rank: int, world: int) -> int:
    """This rank's own GPU or, if there are fewer GPUs than ranks, a shared one.

    NCCL rejects two ranks of one host on one GPU. With a different host name for each rank it treats them as ranks of
    different hosts: messages go over the loopback device, and kernels take turns on the GPU.
    """
    count = max(1, torch.cuda.device_count())
    if world > count:
        os.environ |= {"NCCL_HOSTID": f"rank {rank} of {os.getppid()}", "NCCL_NET": "Socket"}
    return rank % count


def _answer(control: Connection) -> None:
    """Answer each question with the rows issued so far, the main thread's line, and whether it is inside torch.compile.

    When the parent ends, this process ends without a message.
    """
    thread = threading.main_thread().ident
    while True:
        try:
            question = control.recv()
            control.send((question, rows_so_far(), line_of_thread(thread), is_compiling(thread)))
        except (EOFError, OSError):
            _end()


def _end() -> NoReturn:
    """End this rank and the processes that it forked at once: the fork server made it the leader of their group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    exits.leave(0)
