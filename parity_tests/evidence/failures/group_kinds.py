"""Kinds of failure of the creation and use of process groups and meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def group_of_one_rank_alone(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def group_of_its_members_alone(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        alone = dist.new_group([1])
        dist.all_reduce(torch.ones(3), group=alone)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def groups_of_other_members(mesh: Any, case: Any) -> None:
    rank = mesh.rank("tp")
    dist.new_group([1] if rank == 1 else [0, 1])
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def groups_in_another_order(mesh: Any, case: Any) -> None:
    orders = [[0], [0, 1]]
    for ranks in orders[::-1] if mesh.rank("tp") == 1 else orders:
        dist.new_group(ranks)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def group_that_lists_its_ranks_in_another_order(mesh: Any, case: Any) -> None:
    group = dist.new_group([1, 0] if mesh.rank("tp") == 1 else [0, 1])
    if mesh.rank("tp") < 2:
        dist.all_reduce(torch.ones(3), group=group)


def group_with_local_synchronization(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def mesh_of_one_rank_alone(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        init_device_mesh("cpu", (mesh.size("tp"), 1), mesh_dim_names=("a", "b"))
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def group_of_a_rank_that_is_not_there(mesh: Any, case: Any) -> None:
    dist.new_group([0, mesh.size("tp") + (1 if mesh.rank("tp") == 1 else -1)])
    dist.all_reduce(torch.ones(3), group=mesh["tp"])


def group_that_is_destroyed(mesh: Any, case: Any) -> None:
    group: Any = dist.new_group(list(range(mesh.size("tp"))))
    dist.all_reduce(torch.ones(3), group=group)
    if mesh.rank("tp") == 1:
        dist.destroy_process_group(group)
    dist.all_reduce(torch.ones(3), group=group)


def float8_sum(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn), group=mesh["tp"])


def dtype_of_no_backend(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int16), group=mesh["tp"])


def bits_of_floats(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.BXOR, group=mesh["tp"])


def message_of_another_size(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.send(torch.ones(4), group_dst=0, group=mesh["tp"])
    elif mesh.rank("tp") == 0:
        dist.recv(torch.empty(2), group_src=1, group=mesh["tp"])


def message_of_another_dtype(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.send(torch.ones(4), group_dst=0, group=mesh["tp"])
    elif mesh.rank("tp") == 0:
        dist.recv(torch.empty(4, dtype=torch.int32), group_src=1, group=mesh["tp"])


def message_of_another_tag(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.send(torch.ones(4), group_dst=0, group=mesh["tp"], tag=3)
    elif mesh.rank("tp") == 0:
        dist.recv(torch.empty(4), group_src=1, group=mesh["tp"], tag=4)


def message_to_itself(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.send(torch.ones(4), group_dst=1, group=mesh["tp"])


def batch_of_messages_of_other_sizes(mesh: Any, case: Any) -> None:
    rank, world, group = mesh.rank("tp"), mesh.size("tp"), mesh["tp"]
    sends = dist.P2POp(dist.isend, torch.ones(5 if rank == 1 else 4), group=group, group_peer=(rank + 1) % world)
    takes = dist.P2POp(dist.irecv, torch.empty(4), group=group, group_peer=(rank - 1) % world)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
