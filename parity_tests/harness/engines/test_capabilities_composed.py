"""Coalesced calls, messages and groups: the same values and rows on lockstep and on gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parity_tests.specimens.engine_agreement import (
    Pairs,
    agree,
    all_gather,
    all_held,
    initial_tensor,
    verify,
)
from shardproof.declare.case import CaseSpec


def coalesced_calls(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    a, b = initial_tensor(rank), initial_tensor(rank, shape=(4,))
    with dist._coalescing_manager(group):
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    yield [a, b], [sum(all_held(mesh)), sum(all_held(mesh, shape=(4,)))]
    wholes = [torch.empty(2 * size, 3), torch.empty(4 * size)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        all_gather(wholes[0], initial_tensor(rank), group=group)
        all_gather(wholes[1], initial_tensor(rank, shape=(4,)), group=group)
    manager.wait()
    yield wholes, [torch.cat(all_held(mesh)), torch.cat(all_held(mesh, shape=(4,)))]


def messages(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    left, right = (rank - 1) % size, (rank + 1) % size
    got = torch.empty(2, 3)
    if rank % 2 == 0:
        dist.send(initial_tensor(rank), group_dst=right, group=group, tag=3)
        dist.recv(got, group_src=left, group=group, tag=3)
    else:
        dist.recv(got, group_src=left, group=group, tag=3)
        dist.send(initial_tensor(rank), group_dst=right, group=group, tag=3)
    yield got, initial_tensor(left)
    first, second = torch.empty(2, 3), torch.empty(4, dtype=torch.int64)
    works = [
        dist.isend(initial_tensor(rank), group_dst=right, group=group, tag=1),
        dist.isend(initial_tensor(rank, torch.int64, (4,)), group_dst=right, group=group, tag=2),
        dist.irecv(first, group_src=left, group=group, tag=1),
        dist.irecv(second, group_src=left, group=group, tag=2),
    ]
    for work in works:
        work.wait()
    yield [first, second], [initial_tensor(left), initial_tensor(left, torch.int64, (4,))]
    got = torch.empty(2, 3)
    batch = [
        dist.P2POp(dist.isend, initial_tensor(rank), group=group, group_peer=right),
        dist.P2POp(dist.irecv, got, group=group, group_peer=left),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    yield got, initial_tensor(left)


def groups(mesh: Any, case: CaseSpec) -> Pairs:
    size, rank = dist.get_world_size(), dist.get_rank()
    ends = dist.new_group([0, size - 1])
    rest = dist.new_group([1, 2]) if size > 3 else None
    inside = ends if rank in (0, size - 1) else rest
    x = initial_tensor(rank)
    dist.all_reduce(x, group=inside)
    yield x, initial_tensor(0) + initial_tensor(size - 1) if inside is ends else initial_tensor(1) + initial_tensor(2)
    yield dist.get_process_group_ranks(inside), [0, size - 1] if inside is ends else [1, 2]
    two = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    x = initial_tensor(rank)
    dist.all_reduce(x, group=two.get_group("dp"))
    yield x, initial_tensor(rank % (size // 2)) + initial_tensor(rank % (size // 2) + size // 2)
    flat = two._flatten("both") if size > 2 else two
    yield flat.size(), size


def three_axes(mesh: Any, case: CaseSpec) -> Pairs:
    coordinate = torch.tensor([mesh.rank(axis) for axis in mesh.axes])
    for place, axis in enumerate(mesh.axes):
        x = coordinate.clone()
        dist.all_reduce(x, group=mesh[axis])
        want = coordinate * mesh.size(axis)
        want[place] = sum(range(mesh.size(axis)))
        yield x, want


def from_anybody(mesh: Any, case: CaseSpec) -> Pairs:
    group, rank, size = mesh["tp"], mesh.rank("tp"), mesh.size("tp")
    if rank == 0:
        for _ in range(1, size):
            got = torch.empty(2, 3)
            sender = dist.recv(got, group=group)
            yield got, initial_tensor(sender)
    else:
        dist.send(initial_tensor(rank), group_dst=0, group=group)
        yield None, None
    if rank == 0:
        dist.send_object_list([{"a": 1}], group_dst=1, group=group)
    elif rank == 1:
        line = [None]
        dist.recv_object_list(line, group_src=0, group=group)
        yield line, [{"a": 1}]


BODIES = (coalesced_calls, messages, groups)


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("body", BODIES)
def test_lockstep_and_gloo_agree(body, world):
    agree(body, {"tp": world})


@pytest.mark.parametrize("schedule", (1, 2, 3))
@pytest.mark.parametrize("body", (*BODIES, from_anybody))
def test_values_do_not_depend_on_the_interleaving(body, schedule):
    verify(body, "lockstep", {"tp": 4}, schedule=schedule)


def test_world_of_one_takes_the_same_path():
    verify(coalesced_calls, "lockstep", {"tp": 1})


@pytest.mark.parametrize("mesh", ({"pp": 2, "dp": 2, "tp": 2}, {"dp": 1, "tp": 2, "cp": 2}))
def test_three_axes(mesh):
    agree(three_axes, mesh)


@pytest.mark.parametrize("world", (2, 4))
def test_lockstep_receives_from_anybody(world):
    verify(from_anybody, "lockstep", {"tp": world})
