"""A tensor on the CPU: the full tensor of whatever was distributed, and this rank's shard where that is asked for."""

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parity_tests.harness.run.engines import run
from shardproof import CaseSpec, check, every_case, scheme
from torch_impl.parallelizer import to_cpu

PLACEMENTS = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(1), "addends": Partial()}


def whole_array(x):
    return x


@scheme(
    reference=whole_array,
    mesh={"a": (1, 2), "b": (1, 2)},
    inputs={"x": "i j a=I b=I"},
    outputs="i j a=I b=I",
    dims={"i": (1, 3, 4), "j": (3,)},
    rank_options={"over_a": tuple(PLACEMENTS), "over_b": tuple(PLACEMENTS)},
    nograd=("x",),
    dtypes=("float32", "float64"),
    excluded_conditions=("inference_mode", "overwritten"),  # what is full and on the CPU already is returned as it is
)
def full_value_on_the_cpu(mesh, x, over_a, over_b):
    """Uneven and empty shards; of addends one rank has the value and the others have nothing."""
    placements = [PLACEMENTS[over_a], PLACEMENTS[over_b]]
    cut = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(x, mesh.device_mesh, cut).to_local()
    for axis, placement in zip("ab", placements, strict=True):
        local = torch.zeros_like(local) if placement.is_partial() and mesh.rank(axis) else local
    v = DTensor.from_local(local, mesh.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
    return to_cpu(v.requires_grad_())


@given(every_case(full_value_on_the_cpu))
def test_parity(case):
    check(case)


def on_ranks(body, tp=2):
    return run(body, CaseSpec(scheme="to_cpu", mesh={"tp": tp}))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_put_together_are_the_full_tensor(dim, tp):
    x = torch.arange(15.0).view(5, 3)

    def body(mesh, case):
        v = DTensor.from_local(
            x.tensor_split(tp, dim)[mesh.rank("tp")],
            mesh.device_mesh,
            [Shard(dim)],
            shape=x.shape,
            stride=x.stride(),
            run_check=False,
        )
        local = to_cpu(v.requires_grad_(), local=True)
        return local.tolist(), local.shape, local.requires_grad

    ranks = on_ranks(body, tp)
    outcome = [torch.tensor(local).view(shape) for local, shape, _ in ranks.results]
    assert torch.equal(torch.cat(outcome, dim), x) and ranks.ledger.rows == []
    assert not any(requires for _, _, requires in ranks.results)


def test_partial_sums_are_summed_and_are_no_shard():
    def body(mesh, case):
        v = DTensor.from_local(torch.full((2,), mesh.rank("tp") + 1.0), mesh.device_mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"to_cpu: v is \(Partial\(sum\),\), so that a rank has a partial sum"):
            to_cpu(v, local=True)
        return to_cpu(v).tolist()

    assert on_ranks(body, 4).results == ([10.0, 10.0],) * 4


def test_what_is_on_the_cpu_is_the_same_object():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    outcome = to_cpu(parameter)
    assert outcome is parameter and outcome.grad is parameter.grad
    assert to_cpu(to_cpu(parameter)) is parameter


@pytest.mark.parametrize("v", [None, 3, "x", [torch.ones(1)], {"a": 1}])
def test_what_is_no_tensor_comes_back(v):
    assert to_cpu(v) is v
    assert to_cpu(v, local=True) is v


def test_a_tensor_without_values_is_rejected():
    def body(mesh, case):
        v = DTensor.from_local(torch.ones(2, device="meta"), mesh.device_mesh, [Shard(0)], run_check=False)
        with pytest.raises(ValueError) as caught:
            to_cpu(v)
        return str(caught.value)

    ranks = on_ranks(body)
    assert ranks.results == ("parallelizer.to_cpu: v is a DTensor on 'meta', which has no values",) * 2
    assert ranks.ledger.rows == []
