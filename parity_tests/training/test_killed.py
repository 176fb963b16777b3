"""A training run whose process is killed goes on from its checkpoints: to the bit on its mesh, equal on another."""

import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from parity_tests.training.small import LAYERS
from parity_tests.training.started import Mark
from shardproof.training import checkpoint, record, session
from shardproof.training.follow import ReferenceSteps
from shardproof.training.run import SIZES, Run

STEPS = 8  # of the run that nothing interrupts
LIMIT_S = 120
GONE_S = 10.0  # until the last process has ended, on a loaded machine
KNOWN = ReferenceSteps()  # one compiled reference for all runs
# A moment of the run, by the content of the folder of checkpoints.
MOMENTS = {
    "after the first checkpoint": lambda folder: (folder / "step_000001" / "done").exists(),
    "while the third is written": lambda folder: (folder / "step_000003").exists(),
}


def small(mesh, **settings):
    return Run.on(mesh, **{"steps": STEPS, "every": STEPS, "sizes": {**SIZES, "layers": LAYERS}, **settings})


@contextmanager
def records():
    """The result of each step, by its number, of the runs that are followed meanwhile."""
    read, written = record.read, {}

    def reading(folder, index):
        step = read(folder, index)
        if step is not None:
            written[index] = step
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "read", reading)
        yield written


@pytest.fixture(scope="module")
def uninterrupted():
    """Every step of the run that nothing interrupts."""
    with records() as written:
        session.followed(small({"dp": 2}), KNOWN, "gloo")
    return written


def killed(folder, moment):
    """Start the command, and kill it at a moment; no rank outlives it."""
    mark = Mark()
    how = ["train", "--mesh", "dp=2", "--steps", "100000", "--every", "1", "--checkpoint", str(folder), "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "parity_tests.training.small", *how], env=mark.environment)
    try:
        deadline = time.monotonic() + LIMIT_S
        while not moment(folder):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert mark.left_after(GONE_S) == []


def same(one, other):
    """Whether two records are the same to the bit."""
    pairs = [(one.loss, other.loss), (one.norm, other.norm)]
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert ours.keys() == theirs.keys()
        pairs += [(ours[name], theirs[name]) for name in ours]
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_continues(tmp_path, moment, uninterrupted):
    killed(tmp_path / "run", MOMENTS[moment])
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere")
    run = small({"dp": 2}, checkpoint=str(tmp_path / "run"), resume=True)
    assert (tmp_path / "run" / checkpoint.LOCK).exists()  # which its process held
    first = checkpoint.newest(run)
    assert 0 < first < STEPS
    with records() as written:
        steps = session.followed(run, KNOWN, "gloo")
    assert [step.index for step in steps] == list(range(first, STEPS)) == sorted(written)
    assert all(same(written[index], uninterrupted[index]) for index in written)
    elsewhere = small({"cp": 2}, checkpoint=str(tmp_path / "elsewhere"), resume=True)
    steps = session.followed(elsewhere, KNOWN, "lockstep")
    assert [step.index for step in steps] == list(range(first, STEPS)) and all(step.ok for step in steps)
