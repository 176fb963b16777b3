"""Ranks of lockstep share DTensor's results of sharding propagation, and each has its own copy."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.lockstep import lockstep, propagation


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    """New tables, and no session with threads that have cached anything."""
    monkeypatch.setattr(propagation, "_answers", {})
    monkeypatch.setattr(propagation, "_metadata", {})
    for session in list(lockstep._sessions.values()):
        session.close()
    lockstep._sessions.clear()


@pytest.fixture
def counted(monkeypatch):
    """How often torch itself propagates."""
    counts, original = {"all": 0}, ShardingPropagator.propagate_op_sharding_non_cached

    def propagated(self, schema):
        counts["all"] += 1
        return original(self, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", propagated)
    return counts


def sharded(mesh, rows, dtype=torch.float64):
    full = torch.arange(rows * 3, dtype=dtype).view(rows, 3)
    local = full.tensor_split(mesh.size("tp"))[mesh.rank("tp")]
    return DTensor.from_local(local, mesh.device_mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(3, 1))


def product(mesh, case):
    """Its gradient, in full, and how it is sharded."""
    x = sharded(mesh, case.dims["b"]).requires_grad_()
    y = (x * x).sum(1).view(-1, 1)
    y.sum().backward()
    assert y.device_mesh == x.grad.device_mesh == mesh.device_mesh
    return x.grad.full_tensor().tolist(), y.placements


def case(world, rows):
    return CaseSpec("propagation", {"tp": world}, {"b": rows})


def test_four_ranks_propagate_as_often_as_one(counted):
    run(product, case(1, 8))
    once, counted["all"] = counted["all"], 0
    outcome = run(product, case(4, 8)).results
    assert once > 0 and counted["all"] == once
    full = torch.arange(24, dtype=torch.float64).view(8, 3)
    assert outcome == (((2 * full).tolist(), (Shard(0),)),) * 4


@pytest.mark.parametrize(("rows", "propagations"), [(8, 2), (7, 8)])
def test_ranks_with_shards_of_unlike_sizes_propagate_each_for_itself(counted, rows, propagations):
    def job(mesh, case):
        doubled = sharded(mesh, rows) * 2.0
        doubled.sum()
        return doubled.to_local().tolist()

    outcome = run(job, case(4, rows)).results
    assert counted["all"] == propagations
    assert [row for rank in outcome for row in rank] == (2.0 * torch.arange(rows * 3.0).view(rows, 3)).tolist()


@pytest.mark.parametrize(("rows", "propagations"), [(8, 1), (6, 4)])
def test_shards_of_parts_are_shared_if_all_parts_divide(counted, rows, propagations):
    """As FSDP2 shards what is sharded over tp already; 6 rows are two parts of 3, which 2 ranks share unevenly."""

    def job(mesh, case):
        halves = [part.tensor_split(2)[mesh.rank("dp")] for part in torch.arange(rows * 3.0).view(rows, 3).chunk(2)]
        local = torch.cat(halves).tensor_split(2)[mesh.rank("tp")]
        placements = [placement_types._StridedShard(0, split_factor=2), Shard(0)]
        x = DTensor.from_local(
            local, mesh.device_mesh, placements, run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
        )
        y = x * 2.0
        return y.placements == tuple(placements), y.to_local().equal(2.0 * local)

    outcome = run(job, CaseSpec("propagation", {"dp": 2, "tp": 2}, {"b": rows})).results
    assert outcome == ((True, True),) * 4
    assert counted["all"] == propagations


def test_numbers_of_other_kinds_are_other_arguments():
    def job(mesh, case):
        return (sharded(mesh, 8, torch.int64) ** case.exponent)._spec.tensor_meta.dtype

    outcome = []
    for exponent in (2, 2.0):
        outcome += run(job, case(2, 8).replace(options={"exponent": exponent})).results
        lockstep._sessions.popitem()[1].close()  # torch 2.11's own cache, of each thread, takes 2 and 2.0 for the same
    assert outcome == [torch.int64] * 2 + [torch.float32] * 2


def test_the_default_dtype_is_an_argument():
    def job(mesh, case):
        x = sharded(mesh, 8, torch.int64)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float32 if case.seed == 0 else torch.float64)
            return (x / 2)._spec.tensor_meta.dtype
        finally:
            torch.set_default_dtype(before)

    outcome = [run(job, case(world, 8).replace(seed=seed)).results[0] for seed, world in enumerate((1, 2))]
    assert outcome == [torch.float32, torch.float64]


def test_a_strategy_that_was_registered_since_is_used(monkeypatch):
    def job(mesh, case):
        return sharded(mesh, 8).sin().placements

    propagator = DTensor._op_dispatcher.sharding_propagator
    op, asked = torch.ops.aten.sin.default, []
    assert run(job, case(2, 8)).results == ((Shard(0),),) * 2
    lockstep._sessions.popitem()[1].close()  # torch's own cache, of each thread, knows nothing of strategies
    table = next(t for name in propagation.STRATEGIES if op in (t := getattr(propagator, name)))
    original = table[op]
    strategy = getattr(original, "func", original)

    def other(*arguments):
        asked.append(op)
        return strategy(*arguments)

    monkeypatch.setitem(table, op, other if strategy is original else replace(original, func=other))
    assert run(job, case(2, 8)).results == ((Shard(0),),) * 2
    assert asked


def test_answers_are_each_ranks_own():
    """torch writes into an answer that it got: one rank's writes must not reach another."""

    def job(mesh, case):
        x = sharded(mesh, 8)
        y = x.redistribute(placements=[Replicate()]) + x
        return id(y._spec), y.device_mesh == mesh.device_mesh, y.full_tensor().sum().item()

    outcome = run(job, case(4, 8)).results
    assert len({spec for spec, _, _ in outcome}) == 4
    assert [(is_own, total) for _, is_own, total in outcome] == [(True, 2.0 * sum(range(24)))] * 4


def test_torch_has_its_own_functions_again():
    before = {name: getattr(ShardingPropagator, name) for name in (propagation.PROPAGATION, propagation.METADATA)}
    run(product, case(2, 8))
    assert {name: getattr(ShardingPropagator, name) for name in before} == before
