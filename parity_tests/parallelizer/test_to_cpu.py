"""A tensor on the CPU: the full tensor of whatever was distributed, and this rank's shard where that is asked for."""

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parity_tests.rejections import rejected
from shardproof import CaseSpec, scheme
from shardproof.engines.engines import run
from torch_impl.parallelizer import to_cpu
from torch_impl.parallelizer.tp_styles import shard_of_halves, shard_of_parts

PLACEMENTS = {
    "whole": Replicate(),
    "rows": Shard(0),
    "columns": Shard(1),
    "addends": Partial(),
    "halves": shard_of_halves(0),
}


def whole_array(x):
    return x


def has_two_halves(case):
    """Halves of rows need an even number of rows, which no other axis shards."""
    chosen = (case.options["over_a"], case.options["over_b"])
    return "halves" not in chosen or (case.i % 2 == 0 and "rows" not in chosen and chosen != ("halves", "halves"))


@scheme(
    reference=whole_array,
    mesh={"a": (1, 2), "b": (1, 2)},
    inputs={"x": "i j a=I b=I"},
    outputs="i j a=I b=I",
    dims={"i": (1, 3, 4), "j": (3,)},
    rank_options={"over_a": tuple(PLACEMENTS), "over_b": tuple(PLACEMENTS)},
    nograd=("x",),
    dtypes=("float32", "float64"),
    assume=has_two_halves,
    excluded_conditions=("inference_mode", "overwritten"),  # a full tensor on the CPU is returned as it is
)
@pytest.mark.cases
def full_value_on_the_cpu(mesh, x, over_a, over_b):
    """Uneven and empty shards, and shards of halves; of addends one rank has the value and the others have nothing."""
    placements = [PLACEMENTS[over_a], PLACEMENTS[over_b]]
    cut = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(x, mesh.device_mesh, cut, src_data_rank=None).to_local()
    for axis, placement in zip("ab", placements, strict=True):
        local = torch.zeros_like(local) if placement.is_partial() and mesh.rank(axis) else local
    v = DTensor.from_local(local, mesh.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
    return to_cpu(v.requires_grad_())


@scheme(
    reference=whole_array,
    mesh={"dp": (2, 1), "ep": (2, 1), "tp": (2, 1)},
    inputs={"x": "e f d dp=I ep=I tp=I"},
    outputs="e f d dp=I ep=I tp=I",
    dims={"e": (4, 8), "f": (4, 8), "d": (2, 3)},
    rank_options={"dim_over_dp": (0, 2)},
    nograd=("x",),
    dtypes=("float32", "float64"),
    excluded_conditions=("inference_mode", "overwritten"),  # a full tensor on the CPU is returned as it is
)
@pytest.mark.cases(12)
def full_stack_on_the_cpu(mesh, x, dim_over_dp):
    """Experts sharded over ep, halves of their rows over tp, and FSDP over dp: on the dim of ep, or on columns."""
    over_dp = shard_of_parts(0, mesh.size("ep")) if dim_over_dp == 0 else Shard(2)
    placements = [over_dp, Shard(0), shard_of_halves(1)]
    return to_cpu(distribute_tensor(x, mesh.device_mesh, placements, src_data_rank=None).requires_grad_())


def shard_unless_summed(x, addends):
    return jnp.zeros_like(x) if addends else x


@scheme(
    reference=shard_unless_summed,
    mesh={"a": (1, 2), "b": (1, 2)},
    inputs={"x": "i/a j/b"},
    outputs="i/a j/b",
    dims={"i": (2, 4), "j": (2, 4)},
    options={"addends": ("", "a", "b", "ab")},
    nograd=("x",),
    dtypes=("float32", "float64"),
    excluded_conditions=("inference_mode", "overwritten"),  # a shard on the CPU is returned as it is
)
@pytest.mark.cases
def shard_on_the_cpu(mesh, x, addends):
    """The shard of a rank, and zeros where an axis has addends and a rank therefore no shard."""
    placements = [Partial() if axis in addends else Shard(dim) for dim, axis in enumerate("ab")]
    v = DTensor.from_local(x, mesh.device_mesh, placements, run_check=False)
    try:
        return to_cpu(v.requires_grad_(), local=True)
    except ValueError as error:
        if not str(error).startswith("parallelizer.to_cpu: v is "):
            raise
        return torch.zeros_like(x)


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


def test_a_tensor_on_the_cpu_is_the_same_object():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    outcome = to_cpu(parameter)
    assert outcome is parameter and outcome.grad is parameter.grad
    assert to_cpu(to_cpu(parameter)) is parameter


@pytest.mark.parametrize("v", [None, 3, "x", [torch.ones(1)], {"a": 1}])
def test_values_that_are_no_tensors_come_back(v):
    assert to_cpu(v) is v
    assert to_cpu(v, local=True) is v


def meta_shard_to_cpu(mesh):
    return to_cpu(DTensor.from_local(torch.ones(2, device="meta"), mesh.device_mesh, [Shard(0)], run_check=False))


test_a_tensor_without_values_is_rejected = rejected(
    {"tp": 2},
    [("meta", meta_shard_to_cpu, "parallelizer.to_cpu: v is a DTensor on 'meta', which has no values")],
)
