"""Functions whose rank 1 errs in a call, and a healthy one: the failure matrices of both engines run them."""

from typing import Any

import torch
import torch.distributed as dist


def healthy(mesh: Any, case: Any) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=mesh["tp"])
    return x[0].item()


def other_dims(mesh: Any, case: Any) -> None:
    dist.all_reduce(torch.ones((3, 2) if mesh.rank("tp") == 1 else (2, 3)), group=mesh["tp"])


def other_call(mesh: Any, case: Any) -> None:
    x = torch.ones(3)
    if mesh.rank("tp") == 1:
        dist.all_gather([torch.empty(3) for _ in range(mesh.size("tp"))], x, group=mesh["tp"])
    else:
        dist.all_reduce(x, group=mesh["tp"])


def other_rows(mesh: Any, case: Any) -> None:
    x = torch.ones(3 if mesh.rank("tp") == 1 else 4)
    dist.all_gather([torch.empty_like(x) for _ in range(mesh.size("tp"))], x, group=mesh["tp"])


def short_receive(mesh: Any, case: Any) -> None:
    if mesh.rank("tp") == 0:
        dist.send(torch.ones(4), group_dst=1, group=mesh["tp"])
    if mesh.rank("tp") == 1:
        dist.recv(torch.ones(2), group_src=0, group=mesh["tp"])
