"""Failures of asynchronous calls: issued now, waited for later."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def never_waits_in_place(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones(3), group=mesh["tp"], async_op=mesh.rank("tp") == 1)


KEPT: list[Any] = []


def keeps_what_it_never_waits_for(mesh: Any, case: Any) -> None:
    KEPT.append(dist.all_reduce(torch.ones(3), group=mesh["tp"], async_op=True))
    dist.barrier(group=mesh["tp"])


def never_waits_for_a_send(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.isend(torch.ones(4), group_dst=0, group=mesh["tp"])
    elif mesh.rank("tp") == 0:
        dist.recv(torch.empty(4), group_src=1, group=mesh["tp"])


def never_waits_for_a_receive(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        dist.irecv(torch.empty(4), group_src=0, group=mesh["tp"])
    elif mesh.rank("tp") == 0:
        dist.send(torch.ones(4), group_dst=1, group=mesh["tp"])
    dist.barrier(group=mesh["tp"])


def never_waits_for_one_of_a_batch(mesh: Any, case: Any) -> None:
    rank, world, group = mesh.rank("tp"), mesh.size("tp"), mesh["tp"]
    sends = dist.P2POp(dist.isend, torch.ones(4), group=group, group_peer=(rank + 1) % world)
    takes = dist.P2POp(dist.irecv, torch.empty(4), group=group, group_peer=(rank - 1) % world)
    works = dist.batch_isend_irecv([sends, takes])
    for work in works[1 if rank == 1 and len(works) > 1 else 0 :]:
        work.wait()
    dist.barrier(group=group)


def waits_for_what_others_lack(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        work = dist.all_reduce(torch.ones(3), group=mesh["tp"], async_op=True)
        assert work is not None
        work.wait()


def waits_in_another_order(mesh: Any, case: Any) -> None:
    group, sizes = mesh["tp"], (5, 3) if mesh.rank("tp") == 1 else (3, 5)
    works = [dist.all_reduce(torch.ones(size), group=group, async_op=True) for size in sizes]
    for work in works:
        assert work is not None
        work.wait()


def polls_for_ever(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 1:
        work = dist.irecv(torch.empty(4), group_src=0, group=mesh["tp"])
        while work is not None and not work.is_completed():
            pass
    dist.barrier(group=mesh["tp"])


def all_poll_for_ever(mesh: Any, case: Any) -> None:
    rank, world = mesh.rank("tp"), mesh.size("tp")
    work = dist.irecv(torch.empty(4), group_src=(rank + 1) % world, group=mesh["tp"])
    while work is not None and not work.is_completed():
        pass
