"""Reductions, dtypes, shapes and asynchronous calls: the same values and rows on lockstep and on gloo.

The public functions of torch.distributed, one by one, are in `torch_functions`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parity_tests.specimens.engine_agreement import (
    Pairs,
    agree,
    all_gather,
    all_held,
    initial_tensor,
    reduce_scatter,
    verify,
)
from shardproof.declare.case import CaseSpec


def reductions(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank = mesh["tp"], mesh.rank("tp")
    every = all_held(mesh)
    stacked = torch.stack(every)
    wants = {"SUM": stacked.sum(0), "MAX": stacked.amax(0), "MIN": stacked.amin(0), "PRODUCT": stacked.prod(0)}
    for name, want in wants.items():
        x = initial_tensor(rank)
        dist.all_reduce(x, getattr(dist.ReduceOp, name), group=group)
        yield x, want
        x = initial_tensor(rank)
        dist.reduce(x, group_dst=mesh.size("tp") - 1, op=getattr(dist.ReduceOp, name), group=group)
        if rank == mesh.size("tp") - 1:
            yield x, want
    for name, step in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
        x, want = initial_tensor(rank, torch.int32), initial_tensor(0, torch.int32)
        for other in range(1, mesh.size("tp")):
            want = step(want, initial_tensor(other, torch.int32))
        dist.all_reduce(x, getattr(dist.ReduceOp, name), group=group)
        yield x, want


def dtypes_and_shapes(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank = mesh["tp"], mesh.rank("tp")
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64):
        for shape in ((2, 3), (0, 3), ()):
            x = initial_tensor(rank, dtype, shape)
            dist.all_reduce(x, group=group)
            yield x, torch.stack(all_held(mesh, dtype=dtype, shape=shape)).sum(0, dtype=dtype)
    x = initial_tensor(rank).t()
    dist.all_reduce(x, group=group)
    yield x, torch.stack(all_held(mesh)).sum(0).t()


def gathers(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int8):
        every = all_held(mesh, dtype=dtype)
        parts = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, initial_tensor(rank, dtype), group=group)
        yield parts, every
        concatenated = torch.empty(2 * size, 3, dtype=dtype)
        all_gather(concatenated, initial_tensor(rank, dtype), group=group)
        yield concatenated, torch.cat(every)
        dist.gather(initial_tensor(rank, dtype), parts if rank == 0 else None, group_dst=0, group=group)
        yield parts, every
    empty = torch.empty(0, 3)
    all_gather(empty, torch.empty(0, 3), group=group)
    yield empty, torch.empty(0, 3)


def asynchronous(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    x, output, part = initial_tensor(rank), torch.empty(2 * size, 3), torch.empty(2, 3)
    works = [
        dist.all_reduce(x, group=group, async_op=True),
        all_gather(output, initial_tensor(rank), group=group, async_op=True),
        reduce_scatter(part, initial_tensor(rank, shape=(2 * size, 3)), group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    every = all_held(mesh)
    total = torch.stack([initial_tensor(r, shape=(2 * size, 3)) for r in range(size)]).sum(0)
    yield [x, output, part], [sum(every), torch.cat(every), total[2 * rank : 2 * rank + 2]]
    y = initial_tensor(rank)
    work = dist.all_reduce(y, group=group, async_op=True)
    yield work.get_future().wait(), [sum(every)]
    work.wait()


def beyond_gloo(mesh: Any, case: CaseSpec) -> Pairs:
    """Calls that NCCL has and gloo rejects."""
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    stacked = torch.empty(size, 2, 3)
    all_gather(stacked, initial_tensor(rank), group=group)
    yield stacked, torch.stack(all_held(mesh))
    x = initial_tensor(rank) * size
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    yield x, sum(all_held(mesh))
    x = initial_tensor(rank, torch.float8_e5m2, (2,))
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    yield x.float(), initial_tensor(size - 1, torch.float32, (2,))
    x = torch.tensor([rank == 0, False])
    dist.all_reduce(x, group=group)
    yield x, torch.tensor([True, False])
    outs = [torch.empty(rank + 1, 2) for _ in range(size)]
    dist.all_to_all(outs, [torch.full((peer + 1, 2), float(rank)) for peer in range(size)], group=group)
    yield outs, [torch.full((rank + 1, 2), float(peer)) for peer in range(size)]
    part, wide = torch.empty(2), initial_tensor(rank, shape=(2 * size,))
    with dist._coalescing_manager(group):
        reduce_scatter(part, wide, group=group)
    yield part, sum(all_held(mesh, shape=(2 * size,)))[2 * rank : 2 * rank + 2]
    y, z = initial_tensor(rank), initial_tensor(rank)
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(y, group_src=0, group=group)
        dist.broadcast(z, group_src=size - 1, group=group)
    manager.wait()
    yield [y, z], [initial_tensor(0), initial_tensor(size - 1)]


BODIES = (reductions, dtypes_and_shapes, gathers, asynchronous)


@pytest.mark.fast_values(4)
@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("body", BODIES)
def test_lockstep_and_gloo_agree(body, world):
    agree(body, {"tp": world})


@pytest.mark.parametrize("schedule", (1, 2, 3))
@pytest.mark.parametrize("body", (*BODIES, beyond_gloo))
def test_values_do_not_depend_on_the_interleaving(body, schedule):
    verify(body, "lockstep", {"tp": 4}, schedule=schedule)


@pytest.mark.parametrize("body", BODIES)
def test_world_of_one_takes_the_same_path(body):
    verify(body, "lockstep", {"tp": 1})


@pytest.mark.parametrize("world", (1, 2, 4))
def test_lockstep_carries_out_calls_that_gloo_rejects(world):
    verify(beyond_gloo, "lockstep", {"tp": world})
