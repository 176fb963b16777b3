"""The one entry to the engines: run a function once per rank and bring back results and ledger."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from shardproof.declare import discover
from shardproof.declare.case import ENGINES, LARGEST_WORLD, CaseSpec
from shardproof.declare.counted import counted
from shardproof.engines.ledger import RunResult

LOCKSTEP_QUIET_S, PROCESS_QUIET_S = 30.0, 10.0


def run(
    fn: Callable[[Any, CaseSpec], Any], case: CaseSpec, engine: str = "lockstep", *, quiet_s: float | None = None
) -> RunResult:
    """Run `fn(mesh, case)` on every rank of `case.mesh`; `mesh` is a torch_impl.collectives.MeshView.

    A result must be picklable and hold no tensor (NumPy arrays travel as bytes). `quiet_s` is how long a rank may
    compute without reaching a collective: by default 10 s in processes and 30 s on lockstep, where only an endless loop
    needs a limit.

    Errors: ValueError for an unknown engine or a world above the limit; RankFailure, one subclass per cause.
    """
    if discover.is_importing_on_rank:
        raise discover.LeftToParent
    if engine not in ENGINES:
        raise ValueError(f"engines.run: engine {engine!r} is not one of {', '.join(ENGINES)}")
    if not 1 <= case.world <= LARGEST_WORLD:
        raise ValueError(f"engines.run: mesh {dict(case.mesh)} has {case.world} ranks; the limit is {LARGEST_WORLD}")
    if engine == "lockstep":
        from shardproof.engines.lockstep import lockstep

        return lockstep.run(fn, case, quiet_s=quiet_s or LOCKSTEP_QUIET_S)
    if engine == "torchrun":
        from shardproof.engines.processes import launch

        return launch.run(fn, case, quiet_s=quiet_s or PROCESS_QUIET_S)
    from shardproof.engines.processes import pool

    return pool.run(fn, case, backend=engine, quiet_s=quiet_s or PROCESS_QUIET_S)


def engine_text(case: CaseSpec, meshes: Iterable[str]) -> str:
    """The engine as a report names it, with the number of GPUs if NCCL ranks share them: `nccl on 1 GPU`."""
    if case.engine != "nccl":
        return case.engine
    import torch  # here: listing schemes needs no torch

    gpus = torch.cuda.device_count()
    worlds = [math.prod(map(int, re.findall(r"=(\d+)", mesh))) for mesh in meshes]
    return f"nccl on {counted(gpus, 'GPU')}" if 0 < gpus < max(worlds, default=case.world) else "nccl"
