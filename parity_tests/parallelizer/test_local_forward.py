"""Styles whose forward sees local tensors: what they send, what they leave behind, whose values they take."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from parity_tests import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.parallelizer.styled import given, styled

ROWS, IN, OUT = 2, 4, 8
AR = "all_reduce"
COSTS = {
    "colwise": ({}, {AR: (1, 8 * ROWS * IN)}),
    "rowwise": ({AR: (1, 8 * ROWS * OUT)}, {}),
    "colwise_gather_output": ({"all_gather": (1, 8 * ROWS * OUT // 2)}, {AR: (1, 8 * ROWS * IN)}),
    "packed_colwise": ({}, {AR: (1, 8 * ROWS * IN)}),
    "packed_rowwise": ({AR: (1, 8 * ROWS * OUT)}, {}),
    "replicate": ({}, {}),
    "replicated_with_grad_allreduce": ({}, {AR: (2, 8 * (IN * OUT + OUT))}),
    "all_reduce": ({AR: (1, 8 * ROWS * OUT)}, {}),
    "moe_identity_expert": ({}, {}),
}


@pytest.mark.parametrize("name", COSTS)
def test_cost(name):
    """What one forward and one backward add to what making the module has sent."""

    def passes(count):
        def body(mesh, case):
            width = {"rowwise": IN * 2, "packed_rowwise": IN * 2}.get(name, IN)
            held = width // 2 if "rowwise" in name else width
            layer = given(torch.ones(OUT, width, dtype=torch.float64), torch.ones(OUT, dtype=torch.float64))
            module = styled(mesh, layer, {"": name})
            x = torch.ones(ROWS, held, dtype=torch.float64, requires_grad=True)
            for _ in range(count):
                y = module(x)
                y.backward(torch.ones_like(y))

        ledger = run(body, CaseSpec(scheme="cost", mesh={"tp": 2})).ledger
        return [{op: ledger.cost(0, phase).get(op, (0, 0)) for op in (AR, "all_gather")} for phase in ("fwd", "bwd")]

    once, twice = passes(1), passes(2)
    for wanted, before, after in zip(COSTS[name], once, twice, strict=True):
        added = {op: (after[op][0] - before[op][0], after[op][1] - before[op][1]) for op in after}
        assert {op: cost for op, cost in added.items() if cost != (0, 0)} == wanted


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_a_distributed_input_is_what_it_stands_for(placement):
    """Of a style that takes its input whole; the gradient comes back as the input is cut."""
    x, weight = torch.arange(8.0).view(ROWS, IN), (torch.arange(32.0) % 5).view(OUT, IN)

    def body(mesh, case):
        module = styled(mesh, given(weight), {"": "packed_colwise"})
        held = distribute_tensor(x, mesh.device_mesh["tp"], [placement]).requires_grad_()
        y = module(held)
        y.backward(torch.ones_like(y))
        rows = torch.cat([half.chunk(2)[mesh.rank("tp")] for half in weight.chunk(2)])
        same = torch.equal(y, x @ rows.T) and torch.equal(held.grad.full_tensor(), weight.sum(0).expand(ROWS, IN))
        return same and held.grad.placements == (placement,)

    assert run(body, CaseSpec(scheme="distributed", mesh={"tp": 2})).results == (True, True)


def test_a_distributed_input_of_rowwise_is_cut_where_its_placement_says():
    x, weight = torch.arange(8.0).view(ROWS, IN), (torch.arange(32.0) % 5).view(OUT, IN)

    def body(mesh, case):
        module = styled(mesh, given(weight), {"": "rowwise"})
        found = [module(distribute_tensor(x, mesh.device_mesh["tp"], [cut])) for cut in (Shard(-1), Replicate())]
        return all(torch.equal(y, x @ weight.T) for y in found)

    assert run(body, CaseSpec(scheme="distributed", mesh={"tp": 2})).results == (True, True)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        raise ArithmeticError(f"weight is a {type(self.weight).__name__}")


def test_a_forward_that_raises_leaves_the_parameters_as_they_were():
    def body(mesh, case):
        module = styled(mesh, Broken(), {"": "replicate"})
        with pytest.raises(ArithmeticError, match="weight is a Tensor"):
            module(torch.ones(2))
        return type(module.weight).__name__, sorted(module.state_dict())

    assert run(body, CaseSpec(scheme="raises", mesh={"tp": 2})).results == (("DTensor", ["weight"]),) * 2


def test_the_styles_own_values_are_those_of_the_first_rank():
    def body(mesh, case):
        layer = given(torch.full((4, 2), float(mesh.rank("tp"))))
        module = styled(mesh, layer, {"": "packed_colwise"})
        return module.weight.to_local().abs().max().item()

    assert run(body, CaseSpec(scheme="values", mesh={"tp": 2})).results == (0.0, 0.0)
