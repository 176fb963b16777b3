"""A mode of torch around `verify`, or a mode that a scheme's file leaves on, changes no verdict."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parity_tests import warm_python
from parity_tests.specimens.small_scheme import declared
from parity_tests.specimens.user_files import RIGHT, TIMES_RANKS, written
from shardproof.endings.exit_status import EQUAL, MISMATCH
from shardproof.engines.modes import outside_modes


def zeros(result):
    return result * 0 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


class ZeroOperations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return zeros(operation(*args, **(kwargs or {})))


class ZeroFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return zeros(function(*args, **(kwargs or {})))


@pytest.mark.parametrize("mode", [FakeTensorMode, ZeroOperations, ZeroFunctions])
def test_a_mode_changes_no_verdict(mode):
    with mode():
        verdicts = [
            declared(lambda mesh, x, n=n: x * n, inputs={"x": "b/tp"}).verify(examples=2, tp=2).ok for n in (2, 3)
        ]
        first = torch.ones(1) * 2
    assert verdicts == [True, False]
    assert isinstance(first, torch._subclasses.FakeTensor) or not first.item()


LEFT_ON = "from torch._subclasses.fake_tensor import FakeTensorMode\nFakeTensorMode().__enter__()\n"


@pytest.mark.parametrize(("engine", "body", "status"), [("lockstep", TIMES_RANKS, MISMATCH), ("gloo", RIGHT, EQUAL)])
def test_a_file_may_leave_a_mode_on(engine, body, status, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written("left_on.py", LEFT_ON, body, engines=(engine,))
    done = warm_python.run("-m", "shardproof", "verify", file, "--engine", engine, "--mesh", "tp=2", "--examples", "1")
    assert done.returncode == status, done.stdout + done.stderr


def test_the_default_device_stays():
    with torch.device("meta"), ZeroFunctions(), outside_modes():
        assert torch.ones(1).is_meta
    assert not torch.overrides._len_torch_function_stack()
