"""Calls of torch's layers above collectives: meshes, DTensor, tensor-parallel plans, FSDP2, DDP, pipeline schedules.

Weights and data are small integers and learning rates powers of two, so that every sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.distributed.tensor as tensor
import torch.distributed.tensor.parallel as parallel
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from parity_tests.harness.engines.torch_functions.cases import numbers, runs, together

MICROBATCHES = 4


def network(depth: int = 2, seed: int = 0) -> nn.Sequential:
    net = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.ReLU())])
    for index, parameter in enumerate(net.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, rank=seed + index) % 3 - 1)
    return net


def trained(net: nn.Module, batch: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The loss and the parameters after two steps."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    for _ in range(2):
        loss = (forward or net)(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in net.parameters())]


# Meshes.


@together(DeviceMesh, "get_group", "get_all_groups", "size", "get_rank", "get_local_rank", "get_coordinate")
def mesh_queries(mesh: Any) -> list:
    whole, tp = mesh.device_mesh, mesh.device_mesh["tp"]
    groups = [whole.get_group("dp"), tp.get_group(), *whole.get_all_groups()]
    members = [dist.get_process_group_ranks(group) for group in groups]
    return [*members, whole.size(), whole.get_rank(), tp.get_local_rank(), whole.get_coordinate()]


@runs(DeviceMesh, "from_group")
def mesh_from_group(mesh: Any, function: Callable) -> list:
    made = function(mesh["tp"], "cpu", mesh_dim_names=("tp",))
    return [made.size(), made.get_local_rank(), distribute_tensor(numbers(4, rank=0), made, [Shard(0)])]


@runs(tensor, "distribute_tensor")
def distributed(mesh: Any, function: Callable) -> list[Tensor]:
    x = function(numbers(5, 6), mesh.device_mesh, [Shard(0), Shard(1)])  # the values come from the first rank
    return [x.to_local(), x]


@runs(tensor, "distribute_module")
def distributed_module(mesh: Any, function: Callable) -> list[Tensor]:
    net = function(network(1), mesh.device_mesh["tp"])
    return trained(net, distribute_tensor(numbers(4, 4, rank=1), mesh.device_mesh["tp"], [Replicate()]))


@runs(tensor, "ones", "zeros")
def made_constant(mesh: Any, function: Callable) -> list[Tensor]:
    x = function(5, 6, device_mesh=mesh.device_mesh, placements=[Shard(0), Shard(1)])
    return [x.to_local(), x]


@runs(tensor, "full")
def made_full(mesh: Any, function: Callable) -> Tensor:
    return function((5, 6), 3.0, device_mesh=mesh.device_mesh, placements=[Shard(0), Replicate()])


@runs(tensor, "empty")
def made_empty(mesh: Any, function: Callable) -> Tensor:
    return function(5, 6, device_mesh=mesh.device_mesh, placements=[Shard(0), Shard(1)]).fill_(2.0)


@runs(tensor, "linspace", "logspace")
def made_with_steps(mesh: Any, function: Callable) -> list[Tensor]:
    x = function(0, 4, 5, device_mesh=mesh.device_mesh["tp"], placements=[Shard(0)])
    return [x.to_local(), x]


@together(DTensor, "from_local", "to_local", "full_tensor")
def from_shards(mesh: Any) -> list[Any]:
    local = numbers(2, 3).requires_grad_()
    x = DTensor.from_local(local, mesh.device_mesh, [Partial(), Shard(0)])
    (x.full_tensor() * numbers(4, 3, rank=0)).sum().backward()
    return [local.grad, x.detach()]


PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial(), Partial("max"))


@together(DTensor, "redistribute")
def redistributed(mesh: Any) -> list[Tensor]:
    """From each placement to each other, on one axis and on two, with divisible sizes and others."""
    values, one = [], mesh.device_mesh["tp"]
    for (source, target), rows in product(permutations(PLACEMENTS, 2), (4, 5)):
        if isinstance(target, Partial):
            continue  # torch makes a partial value only from a replicated one, and only in a backward
        x = redistributable(one, [source], rows)
        values.append(x.redistribute(placements=[target]).to_local())
    both = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Partial(), Shard(1))]
    for source, target in permutations(both, 2):
        if not any(isinstance(placement, Partial) for placement in target):
            x = redistributable(mesh.device_mesh, source, 5)
            values.append(x.redistribute(placements=target).to_local())
    return values


def redistributable(mesh: DeviceMesh, placements: Any, rows: int) -> DTensor:
    whole = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    local = distribute_tensor(numbers(rows, 6, rank=0), mesh, whole).to_local()
    local = local + dist.get_rank() if whole != list(placements) else local
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((rows, 6)), stride=(6, 1))


# Tensor-parallel plans.


def planned(mesh: Any, net: nn.Module, plan: Any, batch: Tensor) -> list[Tensor]:
    return trained(parallel.parallelize_module(net, mesh.device_mesh["tp"], plan), batch)


@together(parallel, "parallelize_module", "ColwiseParallel", "RowwiseParallel")
def by_columns_and_rows(mesh: Any) -> list[Tensor]:
    return planned(
        mesh, network(), {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}, numbers(4, 4, rank=1)
    )


@together(parallel, "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput")
def with_sequences(mesh: Any) -> list[Tensor]:
    net: Any = nn.Sequential(network(1), nn.RMSNorm(4, eps=1.0), network(1))
    net[1].weight.data.fill_(2.0)
    plan = {
        "0": parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        "1": parallel.SequenceParallel(sequence_dim=0, use_local_output=True),
        "2": parallel.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "2.0": parallel.ColwiseParallel(output_layouts=Replicate()),
    }
    parallel.parallelize_module(net, mesh.device_mesh["tp"], plan)
    return [net(numbers(4, 4, rank=1)).detach()]


@runs(parallel, "PrepareModuleInputOutput")
def prepared(mesh: Any, function: Callable) -> list[Tensor]:
    net = nn.Sequential(network(1))
    style = function(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    plan = {"0": style, "0.0": parallel.ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
    return planned(mesh, net, plan, numbers(2, 4, rank=mesh.rank("tp")))


# FSDP2.


def sharded(mesh: Any, **options: Any) -> Any:
    net = network()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh.device_mesh, **options)
    return net


@runs(fsdp, "fully_shard")
def fully_sharded(mesh: Any, function: Callable) -> list[list[Tensor]]:
    unresharded = function(network(), mesh=mesh.device_mesh["tp"], reshard_after_forward=False)
    in_bfloat16 = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    nets = sharded(mesh), sharded(mesh, mp_policy=in_bfloat16), unresharded
    return [trained(net, numbers(2, 4)) for net in nets]


@runs(fsdp, "register_fsdp_forward_method")
def forward_by_another_name(mesh: Any, function: Callable) -> list[Tensor]:
    net = sharded(mesh)
    net.encode = net.forward
    function(net, "encode")
    return trained(net, numbers(2, 4), net.encode)


@runs(fsdp, "share_comm_ctx")
def two_roots(mesh: Any, function: Callable) -> list[Tensor]:
    roots: list[Any] = [fully_shard(network(1, seed), mesh=mesh.device_mesh["tp"]) for seed in (0, 3)]
    function(roots)
    return trained(nn.ModuleList(roots), numbers(2, 4), lambda x: roots[1](roots[0](x)))


SETTINGS = {
    "unshard": (),
    "reshard": (),
    "set_is_last_backward": (True,),
    "set_requires_gradient_sync": (True,),
    "set_requires_all_reduce": (True,),
    "set_reshard_after_forward": (False,),
    "set_reshard_after_backward": (False,),
    "set_unshard_in_backward": (True,),
    "set_all_reduce_hook": (lambda total: total.mul_(2.0),),
    "set_reduce_scatter_divide_factor": (4.0,),
    "set_gradient_divide_factor": (4.0,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_reduce_scatter_unused_params": (True,),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_separate_reduce_scatter_group": (True,),
}


@together(FSDPModule, *SETTINGS, "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
def with_settings(mesh: Any) -> list[Tensor]:
    net = sharded(mesh)
    for name, arguments in SETTINGS.items():
        if hasattr(net, name):
            getattr(net, name)(*arguments)
    net.set_modules_to_forward_prefetch([net[0], net[2]])
    net.set_modules_to_backward_prefetch([net[2], net[0]])
    return trained(net, numbers(2, 4))


@runs(FSDPModule, "reset_iter_state")
def interrupted(mesh: Any, function: Callable) -> list[Tensor]:
    net = sharded(mesh)
    net(numbers(2, 4))
    function(net)
    return trained(net, numbers(3, 4))


@together(FSDPModule, "set_requires_gradient_sync")
def accumulated(mesh: Any) -> list[Tensor]:
    net = sharded(mesh)
    net.set_requires_gradient_sync(False)
    net(numbers(2, 4)).sum().backward()
    net.set_requires_gradient_sync(True)
    return trained(net, numbers(3, 4))


@together(fsdp, "UnshardHandle")
def unsharded_ahead(mesh: Any) -> list[Tensor]:
    net = sharded(mesh)
    net.unshard(async_op=True).wait()
    return trained(net, numbers(2, 4))


class CustomReduceScatter:
    """A custom reduce_scatter: the default collective, with memory from torch."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.distributed_c10d._reduce_scatter_base(output_tensor, input_tensor, op, group, async_op)


class CustomAllGather(CustomReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.distributed_c10d._all_gather_base(output_tensor, input_tensor, group, async_op)


@together(FSDPModule, "set_custom_all_gather", "set_custom_reduce_scatter")
def with_custom_collectives(mesh: Any) -> list[Tensor]:
    net = sharded(mesh)
    net.set_custom_all_gather(CustomAllGather())
    net.set_custom_reduce_scatter(CustomReduceScatter())
    return trained(net, numbers(2, 4))


# DDP.


@runs(nn.parallel, "DistributedDataParallel")
def replicated(mesh: Any, function: Callable) -> list[Tensor]:
    return trained(function(network(), process_group=mesh["tp"]), numbers(2, 4))


# Pipelines.


def scheduled(schedule: Any, mesh: Any, per_rank: int, is_v: bool) -> list:
    rank, size = mesh.rank("tp"), mesh.size("tp")
    count = size * per_rank
    mine = [rank, count - 1 - rank] if is_v else [rank + size * step for step in range(per_rank)]
    parts = {number: network(1, seed=number) for number in mine}
    stages = [PipelineStage(parts[n], n, count, torch.device("cpu"), group=mesh["tp"]) for n in mine]
    if torch.__version__.startswith("2.11."):
        # torch 2.11 first sends a scalar into a tensor of one element, to the rank itself too, which gloo rejects.
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = lambda: []
    runner = schedule(
        stages[0] if per_rank == 1 else stages,
        n_microbatches=MICROBATCHES,
        loss_fn=lambda y, target: (y * target).sum(),
        scale_grads=False,
    )
    x, target, losses = numbers(2 * MICROBATCHES, 4, rank=1), numbers(2 * MICROBATCHES, 4, rank=2), []
    inputs = [x] if 0 in mine else []
    wanted = {"target": target, "losses": losses} if count - 1 in mine else {}
    out = runner.step(*inputs, **wanted)
    gradients = [parameter.grad for number in mine for parameter in parts[number].parameters()]
    return [out, [loss.detach() for loss in losses], *gradients]


def schedule_runner(per_rank: int, is_v: bool = False) -> Callable[[Any, Callable], list]:
    return lambda mesh, schedule: scheduled(schedule, mesh, per_rank, is_v)


@together(pipelining, "PipelineStage", "ScheduleGPipe")
def staged(mesh: Any) -> list:
    return scheduled(pipelining.ScheduleGPipe, mesh, per_rank=1, is_v=False)


runs(pipelining, "Schedule1F1B")(schedule_runner(1))
runs(pipelining, "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS")(schedule_runner(2))
runs(pipelining, "ScheduleZBVZeroBubble", "ScheduleDualPipeV")(schedule_runner(2, is_v=True))
