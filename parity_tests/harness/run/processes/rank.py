"""A rank in a process of its own: its groups, its meshes, the functions it has been given, and one run of one."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parity_tests.harness.declare import discover
from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.compiling import is_compiling
from parity_tests.harness.run.failure import GROUP_HINT, RankFailure, RankFault, message_of, raised_by_function
from parity_tests.harness.run.ledger import LedgerRow, line_of_thread, raised_at
from parity_tests.harness.run.lockstep.world import flattened
from parity_tests.harness.run.processes import crash, rank_warnings, status_table
from parity_tests.harness.run.processes.recorder import Recorder, observe_waits
from parity_tests.harness.run.processes.root_cause import DONE, RAISED, Outcome
from torch_impl.collectives import MeshView

BACKEND_TIMEOUT_S = 30  # a last resort, far longer than any of the harness's own limits
MANY_GROUPS = 16  # of a function's own, each with sockets

# key, function if new, the file to import before it, sys.path, case
Job = tuple[str, bytes | None, str | None, Sequence[str], str]

_current: Recorder | None = None


class Rank:
    """One member of the default group. Functions are kept by key, meshes by shape; a job's own groups are not."""

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
        """One job; `ready` is called when function and mesh are there, so that a slow import counts for no rank."""
        key, function, file, path, text = job
        self._settle()
        try:
            if function is not None:
                sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
                with rank_warnings.not_shown():  # the parent has imported the same
                    if file is not None:
                        discover.import_on_rank(file)
                    self._functions[key] = cloudpickle.loads(function)
            case = CaseSpec.from_json(text)
            mesh = self._mesh(case)
        except Exception as error:
            return _raised(self.rank, Recorder(), error)
        self._slot.issue(None, status_table.COMPUTING)
        ready()
        outcome = self._set_up(self._functions[key], mesh, case)
        if outcome is None or outcome.kind == DONE:
            outcome = attempt(self._functions[key], mesh, case, self._slot)
        self._slot.enter(status_table.FINISHED)
        return outcome

    def _set_up(self, function: Any, mesh: MeshView, case: CaseSpec) -> Outcome | None:
        """Run the `setup` of a function that has one, where this rank was last set up for another or on another mesh.

        A pool's rank serves one setup key and does so once; one of torchrun cannot be started anew.
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
        """What holds for a thread and not for the process."""
        torch.set_num_threads(1)
        torch.autograd.set_multithreading_enabled(False)
        if self._device == "cuda":
            torch.cuda.set_device(self._gpu)

    def _mesh(self, case: CaseSpec) -> MeshView:
        # Axes that a job flattened are their mesh's, which serves other jobs.
        self._permanent_groups |= {group for view in self._meshes.values() for group in flattened(view.device_mesh)}
        # The last jobs' groups hold sockets, and only now has everybody left them.
        for group in _abandoned(list(_groups() - self._permanent_groups)):
            dist.destroy_process_group(group)
        shape = tuple(case.mesh.items())
        if shape not in self._meshes:
            names, sizes = zip(*shape, strict=True)
            self._meshes[shape] = MeshView(init_device_mesh(self._device, sizes, mesh_dim_names=names))
            self._permanent_groups |= _groups()
        return self._meshes[shape]


def attempt(fn: Callable, mesh: MeshView, case: CaseSpec, slot: status_table.Slot | None = None) -> Outcome:
    """Call `fn(mesh, case)` under a recorder; whatever happens comes back as an outcome."""
    global _current
    rank = dist.get_rank()
    torch.manual_seed(case.seed + rank)
    with Recorder(slot, case.mesh) as recorder:
        _current = recorder
        try:
            returned = fn(mesh, case)
            if mesh.device_mesh.device_type == "cuda":
                torch.cuda.synchronize()  # a kernel that fails, and a collective that never ends, are this function's
            result = cloudpickle.dumps(returned)
        except BaseException as error:
            return _raised(rank, recorder, error)
        finally:
            _current = None
    rows = tuple(recorder.rows)
    for row in recorder.unwaited():
        return Outcome(rank, RAISED, rows, error=str(row), cause="unwaited", source=row.source)
    return Outcome(rank, DONE, rows, result)


def observe() -> None:
    """Once per process: waits are seen by whoever records."""
    observe_waits(lambda: _current)


def rows_so_far() -> tuple[LedgerRow, ...]:
    recorder = _current
    return tuple(recorder.rows) if recorder is not None else ()


def _groups() -> set[dist.ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)


def _abandoned(groups: list[Any]) -> list[dist.ProcessGroup]:
    """Those that nobody can use any more: a function may keep a group in a global, as training code does.

    No object outside torch's own tables refers to them, and no DeviceMesh, which has the names of its groups, does.
    """
    if not groups:
        return []
    if len(groups) > MANY_GROUPS:  # what is kept by garbage in cycles
        gc.collect()
    tables = [table for table in vars(dist.distributed_c10d).values() if isinstance(table, dict)]
    named = {name for each in gc.get_objects() if type(each) is DeviceMesh for name in _names_in(each)}
    compared = [*groups, object()]  # the last is referred to by nothing but this list
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
    hint = f"; {GROUP_HINT}" if is_of_group else ""  # a group of lockstep raises it with the sentence
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
        trace="".join(traceback.format_exception(raised)),
        from_backend=recorder.is_backends(error),
    )


def main(work_fd: int, control_fd: int, *, rank: int, world: int, backend: str, folder: str) -> None:
    """The main loop of a pool's rank; two sockets lead to the parent.

    Jobs and outcomes travel on the first. On the second a thread of its own answers what has been issued so far, also
    while the main thread hangs, and ends the process when the parent is gone.
    """
    work = Connection(work_fd)
    threading.Thread(target=_answer, args=(Connection(control_fd),), daemon=True).start()
    observe()
    rank_warnings.show_once(str(Path(folder).parent))  # of all pools: a failing case is run again in new ones
    crash.record(crash.path(folder, rank))
    slot = status_table.StatusTable(Path(folder) / "status", world).slot(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    member = Rank(slot, backend, store, rank, world, gpu_of(rank, world) if backend == "nccl" else 0)
    try:
        while True:
            work.send(member.run(work.recv(), ready=lambda: work.send("ready")))
    except (EOFError, ConnectionError):
        _end()  # the parent has let go


def gpu_of(rank: int, world: int) -> int:
    """A GPU of this rank's own or, where there are fewer than ranks, one that several share.

    NCCL rejects two ranks of one host on a GPU. With a host's name for each rank it takes them for ranks of as many
    hosts, whose messages go over the loopback device; their kernels take turns on the GPU.
    """
    count = max(1, torch.cuda.device_count())
    if world > count:
        os.environ |= {"NCCL_HOSTID": f"rank {rank} of {os.getppid()}", "NCCL_NET": "Socket"}
    return rank % count


def _answer(control: Connection) -> None:
    """Answer each question: the rows issued so far, the main thread's line, and whether it is inside torch.compile.

    When the parent ends, this process does so silently.
    """
    thread = threading.main_thread().ident
    while True:
        try:
            question = control.recv()
            control.send((question, rows_so_far(), line_of_thread(thread), is_compiling(thread)))
        except (EOFError, OSError):
            _end()


def _end() -> NoReturn:
    """At once, and with this rank the processes that it forked: the fork server made it the leader of their group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
