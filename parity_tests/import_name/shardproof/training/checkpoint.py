"""Checkpoints of a run: weights and the optimizer's state, in torch's distributed format, for a restart on any mesh.

A checkpoint is a folder `step_N`. It is complete if it has the file `done`, which names the run's settings. It is
first written as `step_N.part` and then renamed, so that a killed run leaves the old checkpoint in place. A complete
checkpoint is loaded only if every file matches its checksum (`digests`). A lock on the file `lock` lets one run at a
time write to the folder. A new run replaces the checkpoints of another run only if asked to.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardproof.declare.counted import counted
from shardproof.training import digests
from shardproof.training.digests import DONE
from shardproof.training.rank_optimizers import RankOptimizers
from shardproof.training.run import Run

LOCK = "lock"


@contextmanager
def locked(run: Run) -> Iterator[None]:
    """Lock the folder of the run against other runs. The system releases the lock of a killed process.

    Errors: ValueError if another run holds the lock.
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


def check_unused(run: Run) -> None:
    """Errors: ValueError if the folder has checkpoints and the run neither goes on from them nor may replace them."""
    steps = finished(run)
    if steps and not (run.resume or run.overwrite):
        raise ValueError(
            f"--checkpoint {run.checkpoint}: has {counted(len(steps), 'checkpoint')} of an earlier run, the last of "
            f"step {steps[-1]}; go on from it by --resume, replace them by --overwrite, or give another folder"
        )


def finished(run: Run) -> list[int]:
    """The steps of the complete checkpoints in the folder, ascending."""
    if run.checkpoint is None:
        return []
    names = (re.fullmatch(r"step_(\d{6}|[1-9]\d{6,})", path.parent.name) for path in _folder(run).glob(f"*/{DONE}"))
    return sorted(int(name[1]) for name in names if name)


def save(run: Run, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers, step: int) -> None:
    """Save the state after `step` steps. `parameters` has this rank's parameters under all of their names."""
    folder = _step_path(run, step)
    beside, replaced = (folder.with_name(f"{folder.name}.{state}") for state in ("part", "replaced"))
    if dist.get_rank() == 0:
        for left in (beside, replaced):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    dcp.save(_state(parameters, optimizer), checkpoint_id=str(beside))
    if dist.get_rank() == 0:
        digests.write(beside, json.dumps({"step": step, **_numbers(run)}))
        if folder.exists():
            folder.rename(replaced)
        beside.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)


def remove(run: Run, steps: Sequence[int]) -> None:
    """Remove checkpoints of an earlier run."""
    for step in steps:
        shutil.rmtree(_step_path(run, step))


def load(run: Run, step: int, parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers) -> None:
    """Load the checkpoint of `step`, verified by `newest`, into the sharded parameters and optimizer."""
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the optimizer's state; loading overwrites it and the parameters
    optimizer.zero_grad()
    dcp.load(_state(parameters, optimizer), checkpoint_id=str(_step_path(run, step)))


def newest(run: Run) -> int:
    """The step of the newest checkpoint, at most the run's last step. All of its files are verified.

    If it is damaged, no older checkpoint is used instead: the user decides.

    Errors: ValueError if there is no checkpoint, if a file is damaged, or if the checkpoint's run has other settings.
    """
    *older, step = [0, *(done for done in finished(run) if done <= run.steps)]
    if step == 0:
        raise ValueError(f"--resume: {run.checkpoint} has no complete checkpoint of {run.steps} steps or fewer")
    try:
        theirs = json.loads(digests.verified_content(_step_path(run, step)))
    except digests.Damage as damage:
        then = f"go on from step {older[-1]}" if older[-1] else "begin anew without --resume"
        raise ValueError(f"--resume: {damage}; {damage.remedy}, or remove {_step_path(run, step)} to {then}") from None
    if theirs["step"] != step:
        name = _step_path(run, theirs["step"]).name
        raise ValueError(
            f"--resume: {_step_path(run, step)} is the checkpoint of step {theirs['step']}; give it the name {name}"
        )
    for name, value in json.loads(json.dumps(_numbers(run))).items():
        if theirs.get(name) != value:
            raise ValueError(f"--resume: {run.checkpoint} is of a run with {name}={theirs.get(name)}, not {value}")
    return step


def _numbers(run: Run) -> dict[str, Any]:
    """The settings that decide the numbers of a run, without its length."""
    return {name: value for name, value in asdict(run.numbers).items() if name not in ("steps", "every")}


def _step_path(run: Run, step: int) -> Path:
    return _folder(run) / f"step_{step:06d}"


def _folder(run: Run) -> Path:
    return Path(run.checkpoint or "")


def _state(parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizers) -> dict[str, torch.Tensor]:
    """The state's tensors, not copies. Names are the same on every mesh; two copies of a parameter have two names."""
    state: dict[str, torch.Tensor] = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    states = optimizer.state
    for name, parameter in parameters.items():
        state |= {f"optimizer.{name}.{kind}": x for kind, x in states[parameter].items()}
    return state
