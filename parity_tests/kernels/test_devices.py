"""Run the tests that call kernels in new processes: in Triton's interpreter, and on CUDA if there is a GPU.

Triton chooses between the two when it is first imported, and an ordinary test process may have imported it already.
One file alone: `TRITON_INTERPRET=1 python -m pytest -W ignore::RuntimeWarning parity_tests/kernels/test_wiring.py`.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity_tests.kernels.files import ON_A_DEVICE
from shardproof.draw import profiles

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# The interpreter computes with NumPy, which warns where a GPU is silent: exp of large numbers, -inf - -inf.
QUIET = ("-W", "ignore::RuntimeWarning")
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="not run: needs triton; pip install -e '.[triton]' in the clone",
    ),
    pytest.mark.timeout(1200),
]


def run_in_new_process(interpret, marks):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *QUIET]
    command += [
        f"--hypothesis-profile={profiles.profile()}",
        "-m",
        marks,
        *(str(FOLDER / file) for file in ON_A_DEVICE),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-20000:] + run.stderr[-2000:]


def installed_version(package):
    installed = importlib.metadata.version(package) if importlib.util.find_spec(package) else "0.0"
    return tuple(map(int, installed.split(".")[:2]))


@pytest.mark.skipif(
    installed_version("triton") < (3, 7) and installed_version("numpy") >= (2, 4),
    reason="not run: triton 3.6's interpreter reads the bound of a loop by int() of an array of one element, "
    "which numpy 2.4 rejects; triton 3.7 takes the element",
)
def test_in_the_interpreter(pytestconfig):
    run_in_new_process("1", pytestconfig.option.markexpr)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: needs CUDA")
def test_on_cuda(pytestconfig):
    """Files whose ranks are on the CPU skip themselves."""
    run_in_new_process("0", pytestconfig.option.markexpr)
