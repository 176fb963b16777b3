"""What a run needs to go on, by torch's distributed checkpoint: weights and the optimizer's state, whatever the mesh.

A checkpoint is a folder `step_N`, and counts once it has the file `done`, which says whose numbers they are. A folder
without it is of a run that was killed, and passed over; one with it is loaded only if every file fits its checksum, see
`digests`. One run at a time writes to the folder, by a lock on its file `lock`.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardproof.training import digests
from shardproof.training.digests import DONE
from shardproof.training.rank_optimizers import RankOptimizers
from shardproof.training.run import Run

LOCK = "lock"


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
    folder = _of_step(run, step)
    if dist.get_rank() == 0 and folder.exists():  # of a run that was killed, or of an earlier one
        (folder / DONE).unlink(missing_ok=True)  # first, so that nobody takes what is left of it for a checkpoint
        shutil.rmtree(folder)
    dist.barrier()
    dcp.save(_state(parameters, optimizer), checkpoint_id=str(folder))
    if dist.get_rank() == 0:
        digests.write(folder, json.dumps({"step": step, **_numbers(run)}))


def load(run: Run, step: int, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers) -> None:
    """The state after `step` steps, which `newest` has verified, into parameters and optimizer, sharded as they are."""
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the tensors of its state, which are all written over, as the parameters are
    optimizer.zero_grad()
    dcp.load(_state(parameters, optimizer), checkpoint_id=str(_of_step(run, step)))


def newest(run: Run) -> int:
    """The steps behind the newest checkpoint that is not past the run's last step. Every file of it is verified.

    It is never passed over for an older one: who resumes decides what to do about a damaged file.

    Errors: ValueError where there is none, where a file is damaged, or where it is of a run with other numbers.
    """
    names = (re.fullmatch(r"step_(\d{6}|[1-9]\d{6,})", path.parent.name) for path in _folder(run).glob(f"*/{DONE}"))
    *older, step = sorted({0} | {int(name[1]) for name in names if name and int(name[1]) <= run.steps})
    if step == 0:
        raise ValueError(f"--resume: {run.checkpoint} has no complete checkpoint of {run.steps} steps or fewer")
    try:
        theirs = json.loads(digests.verified_content(_of_step(run, step)))
    except digests.Damage as damage:
        then = f"go on from step {older[-1]}" if older[-1] else "begin anew without --resume"
        raise ValueError(f"--resume: {damage}; {damage.remedy}, or remove {_of_step(run, step)} to {then}") from None
    if theirs["step"] != step:
        name = _of_step(run, theirs["step"]).name
        raise ValueError(
            f"--resume: {_of_step(run, step)} is the checkpoint of step {theirs['step']}; give it the name {name}"
        )
    for name, value in json.loads(json.dumps(_numbers(run))).items():
        if theirs.get(name) != value:
            raise ValueError(f"--resume: {run.checkpoint} is of a run with {name}={theirs.get(name)}, not {value}")
    return step


def _numbers(run: Run) -> dict[str, Any]:
    """What decides the numbers of a run, but for how long it goes on."""
    return {name: value for name, value in asdict(run.numbers).items() if name not in ("steps", "every")}


def _of_step(run: Run, step: int) -> Path:
    return _folder(run) / f"step_{step:06d}"


def _folder(run: Run) -> Path:
    return Path(run.checkpoint or "")


def _state(parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers) -> dict[str, torch.Tensor]:
    """The tensors themselves, by names that no mesh changes; two stages' copies of a parameter have a name each."""
    state: dict[str, torch.Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    states = optimizer.state
    for name, parameter in parameters.items():
        state |= {f"optimizer.{name}.{kind}": x for kind, x in states[parameter].items()}
    return state
