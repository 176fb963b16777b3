"""Parameters with gradients as ranks have them: DTensors of a rank's shards, or plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def placed(local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Any]) -> Tensor:
    """This rank's shard as a DTensor; without a mesh the tensor itself."""
    return local if mesh is None else DTensor.from_local(local, mesh, list(placements))


def parameter(
    local: Tensor, mesh: DeviceMesh | None = None, placements: Sequence[Any] = (), *, is_whole: bool = False
) -> nn.Parameter:
    """A parameter of zeros with a gradient, of which `local` is this rank's shard.

    Every rank has all of a parameter that `is_whole`, and its shard of the gradient.
    """
    gradient = placed(local.clone(), mesh, placements)
    zeros = placed(torch.zeros_like(local), mesh, placements)
    if is_whole and mesh is not None:
        zeros = placed(local.new_zeros(gradient.shape), mesh, [Replicate()] * mesh.ndim)
    new = nn.Parameter(zeros)
    new.grad = gradient
    return new


def weight(local: Tensor, gradient: Tensor, mesh: DeviceMesh | None, placements: Sequence[Any]) -> nn.Parameter:
    """A parameter and its gradient, of which this rank has these shards."""
    new = nn.Parameter(placed(local.clone(), mesh, placements))
    new.grad = placed(gradient.clone(), mesh, placements)
    return new


def distributed(gradient: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> nn.Parameter:
    """A parameter of zeros with this gradient, which each rank has in full and of which it keeps its shard."""
    created = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    created.grad = distribute_tensor(gradient.clone(), mesh, placements)  # a broadcast writes it
    return created


def fully_sharded(
    mesh: DeviceMesh,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    over_tp: Mapping[str, Any] | None = None,
) -> dict[str, nn.Parameter]:
    """FSDP2's parameters of a module that has these weights, with their gradients, by name.

    With `over_tp`, a placement for each, they are sharded over the axis tp first, and over dp by FSDP2.
    """
    module = nn.Module()
    for name, x in weights.items():
        full = x.clone(memory_format=torch.contiguous_format)  # as FSDP2 asks
        if over_tp is not None:
            full = DTensor.from_local(full, mesh["tp"], [Replicate()]).redistribute(placements=[over_tp[name]])
        module.register_parameter(name, nn.Parameter(full))
    fully_shard(module, mesh=mesh if over_tp is None else mesh["dp"])
    parameters = dict(module.named_parameters())
    for name, each in parameters.items():
        each.grad = shard_of(gradients[name], each)
    return parameters


def shard_of(full: Tensor, like: DTensor) -> DTensor:
    """This rank's shard of a tensor that every rank has, placed as another one is; nothing is sent."""
    replicated = DTensor.from_local(full, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
    return replicated.redistribute(placements=like.placements)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank; all of them take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def stepped(optimizer: torch.optim.Optimizer, states: Iterable[tuple[nn.Parameter, dict[str, Tensor]]]) -> None:
    """One step, from the states that these parameters have."""
    for each, state in states:
        optimizer.state[each] = state
    optimizer.step()
