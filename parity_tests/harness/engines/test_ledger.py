"""The line that the ledger gives for a collective."""

import inspect

import pytest

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce, convert


def summed_twice(mesh, case):
    import torch

    x = torch.ones(3, requires_grad=True)
    y = all_reduce(x, mesh["tp"], out="R")  # the line
    y.sum().backward()
    return float(x.grad[0])


def summed_in_the_backward(mesh, case):
    import torch

    x = torch.ones(3, requires_grad=True)
    y = convert(x, mesh["tp"], src="I", dst="R")  # the line
    y.sum().backward()
    return float(x.grad[0])


def summed_by_dtensor(mesh, case):
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    x = torch.ones(3, requires_grad=True)
    shared = DTensor.from_local(x, mesh.device_mesh, [Replicate()])  # the line
    y = shared.to_local(grad_placements=[Partial()])
    y.sum().backward()
    return float(x.grad[0])


PHASES = {summed_twice: ("fwd", "bwd"), summed_in_the_backward: ("bwd",), summed_by_dtensor: ("bwd",)}


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
@pytest.mark.parametrize("function", PHASES)
def test_a_backward_has_its_forwards_line(function, engine):
    ranks = run(function, CaseSpec("none", {"tp": 2}, {}), engine)
    assert ranks.results == (2.0, 2.0)
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "# the line" in text)
    assert {(row.op, row.phase, row.source) for row in ranks.ledger.rows} == {
        ("all_reduce", phase, f"test_ledger.py:{line}") for phase in PHASES[function]
    }
