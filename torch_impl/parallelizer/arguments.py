"""What a strategy refuses before it changes anything: the same for all strategies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from torch_impl.parallelizer.mesh_axes import MeshAxes, mesh_axes
from torch_impl.parallelizer.plan_check import check_kinds, check_plan

Plan = Mapping[str, ParallelStyle]


def checked_axes(
    model: nn.Module, device_mesh: DeviceMesh, tp_shard_plan: Plan | None, *, fsdp_size: int | None = None
) -> MeshAxes:
    """The mesh's axes, the model and the plan having been looked at. Nothing is changed or sent.

    Without a tensor-parallel axis a plan cuts nothing. `fsdp_size` is over how many ranks parameters will be sharded;
    by default the mesh says.
    """
    check_kinds(model, tp_shard_plan)
    axes = mesh_axes(device_mesh)
    _refuse_parallel(model)
    if axes.tp_mesh is not None:
        check_plan(model, tp_shard_plan, axes.tp_mesh, fsdp_size=axes.shard_size if fsdp_size is None else fsdp_size)
    return axes


def checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r}, a {type(value).__name__}; pass True or False")
    return value


def _refuse_parallel(model: nn.Module) -> None:
    """ValueError where data parallelism was applied to the model, or to any part of it, over whatever ranks."""
    for name, module in model.named_modules():
        shown = repr(name) if name else type(model).__name__
        if isinstance(module, FSDPModule):
            raise ValueError(f"model: {shown} is already an FSDPModule; parallelize a model once")
        if isinstance(module, DistributedDataParallel):
            raise ValueError(f"model: {shown} is a DistributedDataParallel; pass the module inside it")
