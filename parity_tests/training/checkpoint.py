"""What a run needs to go on, by torch's distributed checkpoint: weights and the optimizer's state, whatever the mesh.

A checkpoint is a folder `step_N` of its own, and counts once it has the file `done`, which says whose numbers they are.
What else a folder holds is passed over. One run at a time holds the folder, by a lock on its file `lock`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from parity_tests.training.rank_optimizers import RankOptimizers
from parity_tests.training.run import Run

DONE, LOCK = "done", "lock"


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Lock the folder of the run against other runs. The system releases the lock of a killed process.

    Errors: ValueError where another run has it.
    """
    if run.checkpoint is None or (run.resume and not _folder(run).is_dir()):
        yield
        return
    _folder(run).mkdir(parents=True, exist_ok=True)
    with (_folder(run) / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--checkpoint {run.checkpoint}: another run writes there; wait until it has ended, or give another "
                "folder"
            ) from None
        yield


def save(run: Run, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers, step: int) -> None:
    """After `step` steps; `parameters` are this rank's parameters by every name that the model has for them."""
    folder = _folder(run) / f"step_{step:06d}"
    if dist.get_rank() == 0 and folder.exists():  # cut short, or of another time
        shutil.rmtree(folder)
    dist.barrier()
    dcp.save(_state(parameters, optimizer), checkpoint_id=str(folder))
    if dist.get_rank() == 0:
        (folder / f"{DONE}.part").write_text(_owner(run))
        os.replace(folder / f"{DONE}.part", folder / DONE)  # whole or not there


def load(run: Run, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers) -> int:
    """The newest state into parameters and optimizer, sharded as they are; returns how many steps it has behind it.

    Errors: those of `newest`.
    """
    step = newest(run)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the tensors of its state, which are all written over, as the parameters are
    optimizer.zero_grad()
    dcp.load(_state(parameters, optimizer), checkpoint_id=str(_folder(run) / f"step_{step:06d}"))
    return step


def newest(run: Run) -> int:
    """The steps behind the newest checkpoint that is whole and not past the run's last step.

    Errors: ValueError where there is none, or it is of a run with other numbers.
    """
    names = ((re.fullmatch(r"step_(\d{6,})", path.parent.name), path) for path in _folder(run).glob(f"*/{DONE}"))
    by_step = {int(name[1]): path for name, path in names if name and path.stat().st_size}
    usable = [step for step in by_step if step <= run.steps]
    if not usable:
        raise ValueError(f"--resume: {run.checkpoint} has no whole checkpoint of {run.steps} steps or fewer")
    theirs, ours = json.loads(by_step[max(usable)].read_text()), json.loads(_owner(run))
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise ValueError(f"--resume: {run.checkpoint} is of a run with {name}={theirs.get(name)}, not {value}")
    return max(usable)


def _owner(run: Run) -> str:
    """What decides the numbers of a run, but for how long it goes on."""
    return json.dumps({name: value for name, value in asdict(run.numbers).items() if name not in ("steps", "every")})


def _folder(run: Run) -> Path:
    return Path(run.checkpoint or "")


def _state(parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers) -> dict[str, torch.Tensor]:
    """The tensors themselves, by names that no mesh changes; two stages' copies of a parameter have a name each."""
    state: dict[str, torch.Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    states = optimizer.state
    for name, parameter in parameters.items():
        state |= {f"optimizer.{name}.{kind}": x for kind, x in states[parameter].items()}
    return state
