"""Calls of torch.distributed itself: collectives, messages, objects, groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parity_tests.harness.engines.torch_functions.cases import SIZE, numbers, runs, together


@runs(dist, "all_reduce")
def reduced(mesh: Any, function: Callable) -> list[Tensor]:
    x, work_of = numbers(2, 3), numbers(4)
    function(x)
    work = function(work_of, dist.ReduceOp.MAX, group=mesh["tp"], async_op=True)
    work.wait()
    return [x, work_of]


@runs(dist, "all_reduce_coalesced")
def reduced_together(mesh: Any, function: Callable) -> list[Tensor]:
    tensors = [numbers(2, 3), numbers(4)]
    function(tensors)
    return tensors


@runs(dist, "reduce")
def reduced_to_one(mesh: Any, function: Callable) -> Tensor | None:
    x = numbers(2, 3)
    function(x, 1)
    return x if dist.get_rank() == 1 else None  # the others' tensors are not defined


@runs(dist, "broadcast")
def broadcast(mesh: Any, function: Callable) -> Tensor:
    x = numbers(2, 3)
    function(x, 2)
    return x


@runs(dist, "all_gather")
def gathered(mesh: Any, function: Callable) -> list[Tensor]:
    parts = [torch.empty(2, 3) for _ in range(SIZE)]
    function(parts, numbers(2, 3))
    return parts


@runs(dist, "all_gather_coalesced")
def gathered_together(mesh: Any, function: Callable) -> list[list[Tensor]]:
    lines = [[torch.empty(2, 3), torch.empty(4)] for _ in range(SIZE)]
    function(lines, [numbers(2, 3), numbers(4)])
    return lines


@runs(dist, "all_gather_single", "all_gather_into_tensor")
def gathered_into_one(mesh: Any, function: Callable) -> Tensor:
    full = torch.empty(2 * SIZE, 3)
    function(full, numbers(2, 3))
    return full


@runs(dist, "gather")
def gathered_by_one(mesh: Any, function: Callable) -> list[Tensor] | None:
    parts = [torch.empty(2, 3) for _ in range(SIZE)] if dist.get_rank() == 1 else None
    function(numbers(2, 3), parts, 1)
    return parts


@runs(dist, "gather_single", "gather_into_tensor")
def gathered_into_one_by_one(mesh: Any, function: Callable) -> Tensor | None:
    full = torch.empty(2 * SIZE, 3) if dist.get_rank() == 1 else None
    function(numbers(2, 3), full, group_dst=1)
    return full


@runs(dist, "scatter")
def scattered(mesh: Any, function: Callable) -> Tensor:
    x = torch.empty(2, 3)
    function(x, [numbers(2, 3, rank=10 * part) for part in range(SIZE)] if dist.get_rank() == 1 else None, 1)
    return x


@runs(dist, "reduce_scatter")
def reduced_and_scattered(mesh: Any, function: Callable) -> Tensor:
    x = torch.empty(2, 3)
    function(x, list(numbers(2 * SIZE, 3).chunk(SIZE)))
    return x


@runs(dist, "reduce_scatter_single", "reduce_scatter_tensor")
def reduced_and_scattered_from_one(mesh: Any, function: Callable) -> Tensor:
    x = torch.empty(2, 3)
    function(x, numbers(2 * SIZE, 3))
    return x


@runs(dist, "all_to_all")
def exchanged_lists(mesh: Any, function: Callable) -> list[Tensor]:
    received = [torch.empty(2, 3) for _ in range(SIZE)]
    function(received, list(numbers(2 * SIZE, 3).chunk(SIZE)))
    return received


@runs(dist, "all_to_all_single")
def exchanged(mesh: Any, function: Callable) -> list[Tensor]:
    even, rank = torch.empty(SIZE, 3), dist.get_rank()
    function(even, numbers(SIZE, 3))
    splits = [(rank + peer) % 3 for peer in range(SIZE)]
    uneven = torch.empty(sum(splits), 2)
    function(uneven, numbers(sum(splits), 2), splits, splits)
    return [even, uneven]


@runs(dist, "barrier")
def met(mesh: Any, function: Callable) -> None:
    function()


@together(dist, "send", "recv")
def handed_on(mesh: Any) -> tuple[Tensor, int | None]:
    rank, x, sender = dist.get_rank(), torch.empty(2, 3), None
    if rank % 2:
        sender = dist.recv(x, rank - 1)
        dist.send(numbers(2, 3), rank - 1, tag=1)
    else:
        dist.send(numbers(2, 3), rank + 1)
        sender = dist.recv(x, rank + 1, tag=1)
    return x, sender


@together(dist, "isend", "irecv")
def passed_around(mesh: Any) -> Tensor:
    rank, x = dist.get_rank(), torch.empty(2, 3)
    works: list[Any] = [dist.isend(numbers(2, 3), (rank + 1) % SIZE), dist.irecv(x, (rank - 1) % SIZE)]
    for work in works:
        work.wait()
    return x


@runs(dist, "batch_isend_irecv")
def passed_around_in_a_batch(mesh: Any, function: Callable) -> Tensor:
    rank, x = dist.get_rank(), torch.empty(2, 3)
    sent = numbers(2, 3)
    batch = [dist.P2POp(dist.isend, sent, (rank + 1) % SIZE), dist.P2POp(dist.irecv, x, (rank - 1) % SIZE)]
    for work in function(batch):
        work.wait()
    return x


@runs(dist, "all_gather_object")
def gathered_objects(mesh: Any, function: Callable) -> list:
    received = [None] * SIZE
    function(received, {"rank": dist.get_rank()})
    return received


@runs(dist, "gather_object")
def gathered_objects_by_one(mesh: Any, function: Callable) -> list | None:
    received = [None] * SIZE if dist.get_rank() == 1 else None
    function("x" * dist.get_rank(), received, 1)
    return received


@runs(dist, "broadcast_object_list")
def broadcast_objects(mesh: Any, function: Callable) -> list:
    objects = [dist.get_rank(), "x" * dist.get_rank()]
    function(objects, 3)
    return objects


@runs(dist, "scatter_object_list")
def scattered_objects(mesh: Any, function: Callable) -> list:
    received = [None]
    function(received, list("abcd") if dist.get_rank() == 1 else None, 1)
    return received


@together(dist, "send_object_list", "recv_object_list")
def handed_on_objects(mesh: Any) -> list:
    rank, objects = dist.get_rank(), [None, None]
    if rank % 2:
        dist.recv_object_list(objects, rank - 1)
    else:
        dist.send_object_list([rank, "x"], rank + 1)
    return objects


@together(dist, "new_group", "destroy_process_group", "get_pg_count")
def own_group(mesh: Any) -> list:
    counts = [dist.get_pg_count()]
    group: Any = dist.new_group([0, 3])
    counts.append(dist.get_pg_count())
    x = numbers(2)
    if dist.get_rank() in (0, 3):
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        counts.append(dist.get_pg_count())
    return [x, [count - counts[0] for count in counts]]


@runs(dist, "new_subgroups")
def halves(mesh: Any, function: Callable) -> list:
    group, every = function(2)
    x = numbers(2)
    dist.all_reduce(x, group=group)
    return [x, len(every)]


@runs(dist, "new_subgroups_by_enumeration")
def enumerated_groups(mesh: Any, function: Callable) -> list:
    group, every = function([[0, 2], [1, 3]])
    x = numbers(2)
    dist.all_reduce(x, group=group)
    return [x, len(every)]


@runs(dist, "init_device_mesh")
def a_second_mesh(mesh: Any, function: Callable) -> list:
    second = function("cpu", (SIZE,), mesh_dim_names=("all",))
    x = numbers(2)
    dist.all_reduce(x, group=second.get_group("all"))
    return [x, second.get_local_rank()]


@runs(dist, "get_rank", "get_world_size", "get_process_group_ranks")
def asked_of_a_group(mesh: Any, function: Callable) -> list:
    return [function(mesh["dp"]), function(mesh["tp"])]


@runs(dist, "get_global_rank", "get_group_rank")
def asked_of_a_rank(mesh: Any, function: Callable) -> list[int]:
    return [function(mesh["tp"], rank) for rank in dist.get_process_group_ranks(mesh["tp"]) if rank < 2]


@runs(dist, "is_initialized")
def asked(mesh: Any, function: Callable) -> bool:
    return function()


@runs(dist, "get_backend_impl")
def asked_of_the_backend(mesh: Any, function: Callable) -> list[int]:
    backend = function(mesh["tp"], torch.device("cpu"))
    return [backend.rank(), backend.size()]


@runs(dist, "set_timeout")
def reduced_in_time(mesh: Any, function: Callable) -> Tensor:
    function(timedelta(minutes=5), mesh["tp"])
    x = numbers(2)
    dist.all_reduce(x, group=mesh["tp"])
    return x


@runs(dist, "record_comm")
def reduced_under_a_name(mesh: Any, function: Callable) -> Tensor:
    x = numbers(2)
    with function("sum"):
        dist.all_reduce(x)
    return x
