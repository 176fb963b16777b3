"""What a strategy refuses before it changes anything: the same for all strategies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.mesh_axes import MeshAxes, mesh_axes
from torch_impl.parallelizer.plan_check import check_kinds, check_plan
from torch_impl.parallelizer.units import blocks

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
    taken = next((name for name, module in _own_units(model) if isinstance(module, FSDPModule)), None)
    if taken is not None:
        raise ValueError(f"model: {taken} is already an FSDPModule; parallelize a model once")
    if axes.tp_mesh is not None:
        check_plan(model, tp_shard_plan, axes.tp_mesh, fsdp_size=axes.shard_size if fsdp_size is None else fsdp_size)
    return axes


def checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: is {value!r}, a {type(value).__name__}; pass True or False")
    return value


def _own_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in model.named_modules()}
    return [(type(model).__name__, model), *((repr(names[id(block)]), block) for block in blocks(model))]
