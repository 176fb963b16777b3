"""What every rank needs, imported once in the fork server so that a rank is a copy and not a start.

It must come before a rank has groups: a module of torch takes the default group as the default of its arguments
when it is imported, and so would keep the group and its sockets open for ever. No thread is started and no CUDA
context is made here: a fork would inherit either in a state of no use. That torch has one thread is set in the
server's environment, before torch is loaded.
"""

from __future__ import annotations

import importlib

import cloudpickle
import torch

from parity_tests.harness.run.processes.recorder import Recorder

NEEDED = (
    "shardproof",
    "parity_tests.harness.run.processes.worker",
    "parity_tests.harness.run.program",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "torch_impl.collectives",
)


def warm() -> None:
    """Import, and pay for first uses: entering a dispatch mode alone imports some hundred modules."""
    for name in NEEDED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    with Recorder():
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad((x * x).sum(), x)
    cloudpickle.loads(cloudpickle.dumps(lambda: x))
