"""Everything private of torch that the parallelizer touches, each thing looked for before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, placement_types


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one, called `name`; the one that stands there already if it has the same ranks.

    Errors: ValueError where the name stands for other ranks.
    """
    return _probed(DeviceMesh, "_flatten")(mesh, name)


def joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several of the same root, in this order."""
    return _probed(DeviceMesh, "_concatenate")(list(meshes))


def one_rank(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """An axis of size 1, called `name`, beside the first axis of a mesh."""
    (first, *_), size = mesh.mesh_dim_names or ("",), mesh.size(0)
    return _probed(DeviceMesh, "_unflatten")(mesh[first], 0, (1, size), (name, f"{name}_{first}"))[name]


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from; itself if it was not."""
    return _probed(DeviceMesh, "_get_root_mesh")(mesh)


def has_flattened(mesh: DeviceMesh, name: str) -> bool:
    """Whether somebody flattened axes of the root under this name."""
    return name in _probed_value(root_of(mesh), "_flatten_mapping")


def halved(dim: int, pieces: int) -> Placement:
    """Each of so many equal pieces of a dim cut over the ranks on its own."""
    return _probed(placement_types, "_StridedShard")(dim, split_factor=pieces)


def replicate_module(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Data parallelism with whole parameters, gradients reduced, under the interface of `fully_shard`."""
    try:
        from torch.distributed._composable import replicate_with_fsdp
    except ImportError:
        raise _missing(torch.distributed, "_composable.replicate_with_fsdp") from None
    _probed(replicate_with_fsdp, "replicate")(module, mesh=mesh, mp_policy=policy)


def after_backward(callback: Callable[[], None]) -> None:
    """Call once this backward, in which we are, has ended, and whatever was asked for before."""
    _probed(_probed_value(torch.autograd.Variable, "_execution_engine"), "queue_callback")(callback)


def largest_magnitudes(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor, NaN where it has one, all in one operation."""
    return list(_probed(torch, "_foreach_norm")(tensors, float("inf")))


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The tree, such as a model's output, with each of its tensors replaced."""
    import torch.utils._pytree as pytree

    return _probed(pytree, "tree_map_only")(torch.Tensor, function, tree)


def _probed(owner: Any, name: str) -> Callable[..., Any]:
    found = _probed_value(owner, name)
    if not callable(found):
        raise _missing(owner, name)
    return found


def _probed_value(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _missing(owner, name)
    return getattr(owner, name)


def _missing(owner: Any, name: str) -> RuntimeError:
    where = getattr(owner, "__name__", type(owner).__name__)
    return RuntimeError(
        f"parallelizer: torch {torch.__version__} has no {where}.{name}, which is needed here; use torch 2.11 to 2.13"
    )
