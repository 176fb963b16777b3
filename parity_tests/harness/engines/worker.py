"""The rank: its main loop, and one run of one function under a recorder.

Two sockets lead to the parent. Jobs and outcomes travel on the first. On the second a thread of its own answers
what has been issued so far, also while the main thread hangs, and ends the process when the parent is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parity_tests.harness.case import CaseSpec
from parity_tests.harness.engines import board
from parity_tests.harness.engines.failure import RankFailure
from parity_tests.harness.engines.ledger import is_plumbing
from parity_tests.harness.engines.recorder import Recorder, observe_waits
from parity_tests.harness.engines.verdict import DONE, RAISED, Outcome
from torch_impl.collectives import MeshView

BACKEND_TIMEOUT_S = 30  # the last net, far above every verdict

_current: Recorder | None = None


def main(work_fd: int, control_fd: int, *, rank: int, world: int, backend: str, folder: str) -> None:
    work = Connection(work_fd)
    threading.Thread(target=_answer, args=(Connection(control_fd),), daemon=True).start()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    observe_waits(lambda: _current)
    slot = board.Board(Path(folder) / "board", world).slot(rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(folder) / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=BACKEND_TIMEOUT_S),
    )
    functions: dict[str, Callable] = {}
    meshes: dict[tuple, MeshView] = {}
    kept = _groups()
    while True:
        try:
            key, function, path, case = work.recv()
        except (EOFError, ConnectionError):
            return
        if function is not None:
            sys.path[:] = path
            functions[key] = cloudpickle.loads(function)
        case = CaseSpec.from_json(case)
        _destroy_groups_except(kept)
        shape = tuple(case.mesh.items())
        if shape not in meshes:
            meshes[shape] = mesh_view(case, "cuda" if backend == "nccl" else "cpu")
            kept = _groups()
        slot.issue("", board.COMPUTING)
        work.send("ready")
        outcome = attempt(functions[key], meshes[shape], case, slot)
        slot.enter(board.FINISHED)
        work.send(outcome)


def _groups() -> set[dist.ProcessGroup]:
    return set(dist.distributed_c10d._world.pg_map)


def _destroy_groups_except(kept: set[dist.ProcessGroup]) -> None:
    """Groups that the last function made: each holds sockets. Only now have all ranks surely left them."""
    for group in _groups() - kept:
        dist.destroy_process_group(group)


def mesh_view(case: CaseSpec, device: str) -> MeshView:
    return MeshView(init_device_mesh(device, tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh)))


def attempt(fn: Callable, mesh: MeshView, case: CaseSpec, slot: board.Slot | None = None) -> Outcome:
    """Call `fn(mesh, case)` under a recorder; whatever happens comes back as an outcome."""
    global _current
    rank = dist.get_rank()
    torch.manual_seed(case.seed + rank)
    with Recorder(slot, case.mesh) as recorder:
        _current = recorder
        try:
            result = cloudpickle.dumps(fn(mesh, case))
        except BaseException as error:
            return _raised(rank, recorder, error)
        finally:
            _current = None
    rows = tuple(recorder.rows)
    for row in recorder.unwaited():
        return Outcome(rank, RAISED, rows, error=str(row), cause="unwaited", source=row.source)
    return Outcome(rank, DONE, rows, result)


def _raised(rank: int, recorder: Recorder, error: BaseException) -> Outcome:
    return Outcome(
        rank,
        RAISED,
        tuple(recorder.rows),
        error=f"{type(error).__name__}: {error}",
        cause=error.cause if isinstance(error, RankFailure) else "raised",
        source=_site(error),
        trace="".join(traceback.format_exception(error)),
        from_backend=recorder.is_backends(error),
    )


def _site(error: BaseException) -> str | None:
    """file:line of the innermost frame that is the user's."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    user = [(name, line) for name, line in frames if not is_plumbing(name)]
    return f"{Path(user[-1][0]).name}:{user[-1][1]}" if user else None


def _answer(control: Connection) -> None:
    """Send the rows issued so far for each message; leave without a word when the parent does."""
    while True:
        try:
            control.recv()
            recorder: Any = _current
            control.send(tuple(recorder.rows) if recorder is not None else ())
        except (EOFError, OSError):
            os._exit(0)
