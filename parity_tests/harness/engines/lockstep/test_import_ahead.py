"""Before it starts ranks, lockstep imports the torch modules that user code imports, and no others."""

from pathlib import Path

import pytest

from parity_tests import warm_python

SCRIPT = """
import sys
from shardproof.declare.case import CaseSpec
from shardproof.engines.lockstep import lockstep
import {module}
heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo")
lockstep.run({module}.{body}, CaseSpec("x", {{"tp": 2}}))
print([name for name in heavy if name in sys.modules])
scaler = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
if scaler is not None:
    print(scaler.ShardedGradScaler.__init__.__defaults__[-1])
"""
PLAIN = """
import torch, torch.distributed as dist
def body(mesh, case):
    x = torch.ones(3, requires_grad=True)
    y = x.clone()
    dist.all_reduce(y.detach(), group=mesh["tp"])
    return torch.autograd.grad(y, x, torch.ones(3))[0].tolist()
"""
DEFERRED = """
import user_layers
def body(mesh, case):
    return user_layers.names()
"""
LAYERS = """
def names():
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    return ShardedGradScaler.__name__
"""


def printed(folder: Path, module: str, body: str) -> list[str]:
    run = warm_python.run("-c", SCRIPT.format(module=module, body=body), folder=folder)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_a_plain_function_loads_no_dtensor(tmp_path):
    (tmp_path / "user_plain.py").write_text(PLAIN)
    assert printed(tmp_path, "user_plain", "body") == ["[]"]


@pytest.mark.slow
def test_a_functions_imports_precede_the_default_group(tmp_path):
    (tmp_path / "user_deferred.py").write_text(DEFERRED)
    (tmp_path / "user_layers.py").write_text(LAYERS)
    loaded, default_group = printed(tmp_path, "user_deferred", "body")
    assert "torch.distributed.fsdp" in loaded and default_group == "None"
