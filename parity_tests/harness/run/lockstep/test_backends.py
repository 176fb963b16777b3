"""What lockstep reports that a real backend would reject, beside what gloo does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.harness.run.lockstep.backends import rejection

CONTIGUOUS = torch.zeros(4, 6)
STRIDED = {
    "transposed": CONTIGUOUS.T,
    "every other column": CONTIGUOUS[:, ::2],
    "expanded": torch.zeros(()).expand(2, 3),
}


@pytest.mark.parametrize("strides", STRIDED)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "scatter", "send"])
def test_strides_are_reported(op, strides):
    x = STRIDED[strides]
    assert rejection(op, [x], []).startswith("its input has strides (")
    assert rejection(op, [CONTIGUOUS], [x]).startswith("its output has strides (")


@pytest.mark.parametrize(
    "x",
    [
        CONTIGUOUS,
        CONTIGUOUS[1:],
        torch.zeros(0, 3).T,
        torch.zeros(1, 3).T,
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_what_every_backend_takes_is_not(x):
    assert rejection("all_reduce", [x], [x]) is None


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
def test_a_dtype_that_backends_lack(dtype):
    name = str(dtype).removeprefix("torch.")
    assert rejection("broadcast", [torch.zeros(2, dtype=dtype)], []) == (
        f"gloo and NCCL have no {name}; pass another dtype"
    )


def exchanged(mesh, case):
    x = torch.arange(16.0).view(4, 4).T
    try:
        dist.all_to_all_single(torch.empty(4, 4), x, group=mesh["tp"])
    except ValueError as error:
        return str(error)
    return "accepted"


def scattered(mesh, case):
    x = torch.arange(16.0).view(4, 4).T
    received = torch.empty(4, 4)
    dist.scatter(received, [x, x] if mesh.rank("tp") == 0 else None, group=mesh["tp"], group_src=0)
    return bool(torch.equal(received, x))


def test_gloo_does_what_is_said_of_it():
    case = CaseSpec("gloo", {"tp": 2})
    assert run(exchanged, case, "gloo").results == ("Tensors must be contiguous",) * 2
    assert run(scattered, case, "gloo").results == (False, False)
    assert run(scattered, case).results == (True, True)
