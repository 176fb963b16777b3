"""Threads of ranks may enter FakeTensorMode and end: torch's fake CUDA guard outlives them."""

import subprocess
import sys

import pytest
import torch

# In a process of its own, which a segmentation fault may end. Garbage overwrites the memory that an ended thread freed.
RUNS = """
from torch._subclasses.fake_tensor import FakeTensorMode
from shardproof.declare.case import CaseSpec
from shardproof.engines.lockstep import lockstep

def entered(mesh, case):
    with FakeTensorMode():
        return mesh.rank("tp")

for _ in range(3):
    assert lockstep.run(entered, CaseSpec("guard", {"tp": 2})).results == (0, 1)
    lockstep._sessions.popitem()[1].close()
    garbage = [bytearray(48) for _ in range(20_000)]
"""


@pytest.mark.skipif(
    not torch.cuda._is_compiled() or torch.cuda.device_count() > 0,
    reason="not run: needs a torch that is built for CUDA, and no GPU",
)
def test_fake_tensors_of_ranks_whose_threads_have_ended():
    ended = subprocess.run([sys.executable, "-c", RUNS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
