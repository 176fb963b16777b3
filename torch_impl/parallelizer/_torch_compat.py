"""The private functions of torch that the parallelizer uses; each is looked up by name before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, placement_types


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one axis called `name`; an axis of that name with the same ranks is reused.

    Errors: ValueError where the name means other ranks.
    """
    return _private_function(DeviceMesh, "_flatten")(mesh, name)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several meshes of the same root, in this order."""
    return _private_function(DeviceMesh, "_concatenate")(list(meshes))


def axis_of_one_rank(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """An axis of size 1, called `name`, next to the first axis of a mesh."""
    (first, *_), size = mesh.mesh_dim_names or ("",), mesh.size(0)
    # torch has no way to add an axis: the first one, of n ranks, is split into 1 x n, and the new axis is the 1.
    return _private_function(DeviceMesh, "_unflatten")(mesh[first], 0, (1, size), (name, f"{name}_{first}"))[name]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from; itself if it was not sliced."""
    return _private_function(DeviceMesh, "_get_root_mesh")(mesh)


def has_flattened(mesh: DeviceMesh, name: str) -> bool:
    """Whether axes of the root mesh were already flattened under this name."""
    return name in _private_attribute(root_mesh(mesh), "_flatten_mapping")


def strided_shard(dim: int, parts: int) -> Placement:
    """A placement that shards each of `parts` equal parts of a dim separately."""
    return _private_function(placement_types, "_StridedShard")(dim, split_factor=parts)


def replicate_module(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Data parallelism with replicated parameters and reduced gradients, with the interface of `fully_shard`."""
    try:
        # Imported here, so that a torch without it fails where it is needed and not when this module is imported.
        from torch.distributed._composable import replicate_with_fsdp
    except ImportError:
        raise _missing(torch.distributed, "_composable.replicate_with_fsdp") from None
    _private_function(replicate_with_fsdp, "replicate")(module, mesh=mesh, mp_policy=policy)


def after_backward(callback: Callable[[], None]) -> None:
    """Queue a call for the end of the backward that is running, after every call that is queued already."""
    _private_function(_private_attribute(torch.autograd.Variable, "_execution_engine"), "queue_callback")(callback)


def largest_magnitudes(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor, NaN where it has one, all in one operation."""
    return list(_private_function(torch, "_foreach_norm")(tensors, float("inf")))


def waited(x: Any) -> Any:
    """x, once the collective that returned it is done, with the same gradient; anything else as it is."""
    kind = _private_attribute(torch.distributed, "_functional_collectives").AsyncCollectiveTensor
    return _Waited.apply(x) if isinstance(x, kind) else x


class _Waited(torch.autograd.Function):
    """The tensor inside of one that is still on its way. No copy."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The tree, such as a model's output, with each of its tensors replaced."""
    import torch.utils._pytree as pytree

    return _private_function(pytree, "tree_map_only")(torch.Tensor, function, tree)


def _private_function(owner: Any, name: str) -> Callable[..., Any]:
    function = _private_attribute(owner, name)
    if not callable(function):
        raise _missing(owner, name)
    return function


def _private_attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise _missing(owner, name)
    return getattr(owner, name)


def _missing(owner: Any, name: str) -> RuntimeError:
    place = getattr(owner, "__name__", type(owner).__name__)
    return RuntimeError(
        f"parallelizer: torch {torch.__version__} has no {place}.{name}, which is needed here; use torch 2.11 to 2.13"
    )
