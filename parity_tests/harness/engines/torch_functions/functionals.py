"""Calls of the functional collectives, and of their older family with gradients, torch.distributed.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as older
from torch import Tensor

from parity_tests.harness.engines.torch_functions.cases import SIZE, numbers, runs, together


def with_gradient(call: Callable[[Tensor], Any], *shape: int) -> list[Any]:
    """The result for an input that is another on each rank, and the gradient for a cotangent that is another too."""
    x = numbers(*shape).requires_grad_()
    y = call(x)
    y = torch.cat([part.reshape(-1) for part in y]) if isinstance(y, list | tuple) else y
    (y * (dist.get_rank() + 1)).sum().backward()
    return [y.detach(), x.grad]


@runs(functional, "all_reduce")
def reduced(mesh: Any, function: Callable) -> list[Tensor]:
    return [
        *with_gradient(lambda x: function(x, "sum", dist.group.WORLD), 2, 3),
        function(numbers(3), "max", mesh["tp"]) + 0,
    ]


@runs(functional, "all_reduce_coalesced")
def reduced_together(mesh: Any, function: Callable) -> list[Tensor]:
    return [x + 0 for x in function([numbers(2, 3), numbers(4)], "sum", dist.group.WORLD)]


@runs(functional, "broadcast")
def broadcast(mesh: Any, function: Callable) -> Tensor:
    return function(numbers(2, 3), 2, dist.group.WORLD) + 0


@runs(functional, "all_gather_single", "all_gather_tensor")
def gathered(mesh: Any, function: Callable) -> list[Tensor]:
    return [function(numbers(2, 3), dim, dist.group.WORLD) + 0 for dim in (0, 1)]


@runs(functional, "all_gather_single_autograd", "all_gather_tensor_autograd")
def gathered_with_gradient(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(x, 1, dist.group.WORLD), 2, 3)


@runs(functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
def gathered_together(mesh: Any, function: Callable) -> list[Tensor]:
    return [x + 0 for x in function([numbers(2, 3), numbers(4)], dist.group.WORLD)]


@runs(functional, "reduce_scatter_single", "reduce_scatter_tensor")
def scattered(mesh: Any, function: Callable) -> list[Tensor]:
    return [function(numbers(SIZE, SIZE), "sum", dim, dist.group.WORLD) + 0 for dim in (0, 1)]


@runs(functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
def scattered_with_gradient(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(x, "sum", 0, dist.group.WORLD), SIZE, 3)


@runs(functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
def scattered_together(mesh: Any, function: Callable) -> list[Tensor]:
    return [x + 0 for x in function([numbers(SIZE, 3), numbers(SIZE)], "sum", [0, 0], dist.group.WORLD)]


@runs(functional, "all_to_all_single")
def exchanged(mesh: Any, function: Callable) -> list[Tensor]:
    splits = [(dist.get_rank() + peer) % 3 for peer in range(SIZE)]
    return [
        function(numbers(SIZE, 3), None, None, dist.group.WORLD) + 0,
        function(numbers(sum(splits), 2), splits, splits, dist.group.WORLD) + 0,
    ]


@runs(functional, "all_to_all_single_autograd")
def exchanged_with_gradient(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(x, [1] * SIZE, [1] * SIZE, dist.group.WORLD), SIZE, 3)


@runs(functional, "permute_tensor")
def permuted(mesh: Any, function: Callable) -> Tensor:
    return function(numbers(6), [1, 2, 3, 0], dist.group.WORLD) + 0


@runs(functional, "wait_tensor")
def waited_for(mesh: Any, function: Callable) -> Tensor:
    world: Any = dist.group.WORLD
    return function(torch.ops._c10d_functional.all_reduce(numbers(2, 3), "sum", world.group_name))


@runs(functional, "allow_inflight_collective_as_graph_input_ctx")
def reduced_in_flight(mesh: Any, function: Callable) -> Tensor:
    world: Any = dist.group.WORLD
    with function():
        return functional.all_reduce(numbers(2, 3), "sum", world) + 0


@runs(functional, "all_reduce_inplace")
def reduced_in_place(mesh: Any, function: Callable) -> Tensor:
    x = numbers(2, 3)
    function(x, "sum", dist.group.WORLD)
    return x + 0


@runs(functional, "all_gather_inplace")
def gathered_in_place(mesh: Any, function: Callable) -> list[Tensor]:
    return function([torch.empty(2, 3) for _ in range(SIZE)], numbers(2, 3), dist.group.WORLD)


@runs(functional, "all_gather_tensor_inplace")
def gathered_into_one_in_place(mesh: Any, function: Callable) -> Tensor:
    return function(torch.empty(2 * SIZE, 3), numbers(2, 3), dist.group.WORLD) + 0


@runs(functional, "reduce_scatter_inplace")
def scattered_in_place(mesh: Any, function: Callable) -> Tensor:
    return function(torch.empty(2, 3), list(numbers(2 * SIZE, 3).chunk(SIZE)), "sum", dist.group.WORLD) + 0


@runs(functional, "reduce_scatter_tensor_inplace")
def scattered_from_one_in_place(mesh: Any, function: Callable) -> Tensor:
    return function(torch.empty(2, 3), numbers(2 * SIZE, 3), "sum", dist.group.WORLD) + 0


@runs(functional, "all_to_all_inplace")
def exchanged_in_place(mesh: Any, function: Callable) -> Tensor:
    return function(torch.empty(SIZE, 3), numbers(SIZE, 3), group=dist.group.WORLD) + 0


@together(functional, "isend_inplace", "irecv_inplace")
def passed_around(mesh: Any) -> Tensor:
    rank = dist.get_rank()
    sent = functional.isend_inplace(numbers(2, 3), (rank + 1) % SIZE)
    received = functional.irecv_inplace(torch.empty(2, 3), (rank - 1) % SIZE)
    functional.wait_tensor(sent)
    return received + 0


@runs(older, "all_reduce")
def older_reduced(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(x * 1), 2, 3)


@runs(older, "reduce")
def older_reduced_to_one(mesh: Any, function: Callable) -> Tensor:
    return with_gradient(lambda x: function(x * 1, 1), 2, 3)[1]  # the others' results are not defined


@runs(older, "broadcast")
def older_broadcast(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(x * 1, 2), 2, 3)


@runs(older, "all_gather")
def older_gathered(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(function, 2, 3)


@runs(older, "_all_gather_base")
def older_gathered_into_one(mesh: Any, function: Callable) -> Tensor:
    return function(torch.empty(2 * SIZE, 3), numbers(2, 3))  # its backward is for NCCL alone


@runs(older, "gather")
def older_gathered_by_one(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(x, 1), 2, 3)


@runs(older, "scatter")
def older_scattered(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(list(x.chunk(SIZE)), 1), 2 * SIZE, 3)


@runs(older, "reduce_scatter")
def older_reduced_and_scattered(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(torch.empty(2, 3), list(x.chunk(SIZE))), 2 * SIZE, 3)


@runs(older, "all_to_all")
def older_exchanged_lists(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function([torch.empty(2, 3) for _ in range(SIZE)], list(x.chunk(SIZE))), 2 * SIZE, 3)


@runs(older, "all_to_all_single")
def older_exchanged(mesh: Any, function: Callable) -> list[Tensor]:
    return with_gradient(lambda x: function(torch.empty(SIZE, 3), x), SIZE, 3)
