"""The line that the ledger gives for a collective."""

import inspect

import pytest

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from torch_impl.collectives import all_reduce


def summed_twice(mesh, case):
    import torch

    x = torch.ones(3, requires_grad=True)
    y = all_reduce(x, mesh["tp"], out="R")
    y.sum().backward()
    return float(x.grad[0])


@pytest.mark.parametrize("engine", ["lockstep", "gloo"])
def test_a_backward_has_its_forwards_line(engine):
    ranks = run(summed_twice, CaseSpec("none", {"tp": 2}, {}), engine)
    assert ranks.results == (2.0, 2.0)
    lines, first = inspect.getsourcelines(summed_twice)
    line = first + next(i for i, text in enumerate(lines) if "all_reduce(x" in text)
    assert {(row.op, row.phase, row.source) for row in ranks.ledger.rows} == {
        ("all_reduce", phase, f"test_ledger.py:{line}") for phase in ("fwd", "bwd")
    }
