"""Private functions of torch that the parallelizer uses. Each is looked up by name; a missing one is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, placement_types

from torch_impl.contract.derivatives import first_derivative_only

Function = TypeVar("Function", bound=Callable[..., Any])


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten all axes of a mesh into one axis called `name`; an axis of that name with the same ranks is reused.

    Errors: ValueError if the name already belongs to other ranks.
    """
    return _private_function(DeviceMesh, "_flatten")(mesh, name)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Join the axes of several meshes of one root into one mesh, in this order."""
    return _private_function(DeviceMesh, "_concatenate")(list(meshes))


def axis_of_one_rank(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Add an axis of size 1, called `name`, to a mesh."""
    (first, *_), size = mesh.mesh_dim_names or ("",), mesh.size(0)
    # torch has no way to add an axis: split the first axis, of n ranks, into 1 x n, and take the first factor.
    return _private_function(DeviceMesh, "_unflatten")(mesh[first], 0, (1, size), (name, f"{name}_{first}"))[name]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this mesh was sliced from, or the mesh itself."""
    return _private_function(DeviceMesh, "_get_root_mesh")(mesh)


def has_flattened(mesh: DeviceMesh, name: str) -> bool:
    """Whether axes of the root mesh have already been flattened under this name."""
    return name in _private_attribute(root_mesh(mesh), "_flatten_mapping")


def strided_shard(dim: int, parts: int) -> Placement:
    """A placement that shards each of a dim's `parts` equal parts separately."""
    return _private_function(placement_types, "_StridedShard")(dim, split_factor=parts)


def parts_as_shards(x: DTensor) -> DTensor:
    """The DTensor, with placements of `strided_shard` that torch can redistribute.

    torch 2.11 reads them as an order of axes and raises where they are none; later versions take them as they are.
    """
    if not torch.__version__.startswith("2.11."):
        return x
    spec = _private_attribute(x, "_spec")
    order_of = _private_function(type(spec), "_maybe_convert_StridedShard_to_shard_order")
    if not spec.use_strided_shard_as_shard_order or order_of(spec.placements, spec.mesh) is not None:
        return x
    of_shards = replace(spec, use_strided_shard_as_shard_order=False)
    return DTensor(_private_attribute(x, "_local_tensor"), of_shards, requires_grad=False)  # pyright: ignore[reportCallIssue]


def register_first(module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> None:
    """Register a forward pre-hook that runs before the module's other ones.

    torch 2.11's compiler counts hooks in the order in which they entered the dictionary, which `prepend=True` does not
    change, and then takes one hook for another. They are entered again, in the order in which they run.
    """
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
    hooks = module._forward_pre_hooks
    in_order = list(hooks.items())
    hooks.clear()
    hooks.update(in_order)


def local_parameter(x: DTensor) -> Tensor:
    """The shard of a parameter; its gradient is a DTensor with the parameter's placement and strides.

    torch 2.11 scales the strides of the shard's gradient by the number of ranks. They then differ from the parameter's
    if shards are uneven, and a placement of `strided_shard` does not survive the copy that mends them.
    """
    if not torch.__version__.startswith("2.11."):
        return x.to_local()
    return _LocalParameter.apply(x)


class _LocalParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.spec = _private_attribute(x, "_spec")
        local = _private_attribute(x, "_local_tensor")
        return local.view_as(local)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[DTensor]:
        (gradient,) = gradients
        return (DTensor(gradient.contiguous(), ctx.spec, requires_grad=False),)  # pyright: ignore[reportCallIssue]


def replicate_module(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply data parallelism with replicated parameters and reduced gradients; same interface as `fully_shard`."""
    try:
        # Import it here, so that a torch without it fails in this call and not at the import of this module.
        from torch.distributed._composable import replicate_with_fsdp
    except ImportError:
        raise _missing(torch.distributed, "_composable.replicate_with_fsdp") from None
    _private_function(replicate_with_fsdp, "replicate")(module, mesh=mesh, mp_policy=policy)


def after_backward(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the running backward, after all callbacks queued before."""
    _private_function(_private_attribute(torch.autograd.Variable, "_execution_engine"), "queue_callback")(callback)


def largest_magnitudes(tensors: list[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor, or NaN if it contains one, all in one operation."""
    return list(_private_function(torch, "_foreach_norm")(tensors, float("inf")))


def waited(x: Any) -> Any:
    """Wait for the collective that returns x, keeping the gradient; other values are returned unchanged."""
    kind = _private_attribute(torch.distributed, "_functional_collectives").AsyncCollectiveTensor
    return _Waited.apply(x) if isinstance(x, kind) else x


class _Waited(torch.autograd.Function):
    """The tensor inside an AsyncCollectiveTensor, without a copy."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


def lookup_backend(name: str) -> Callable[..., Any]:
    """The backend of torch.compile with this name."""
    import torch._dynamo as dynamo  # here, since it loads the compiler

    return _private_function(dynamo, "lookup_backend")(name)


def within_budget(budget: float) -> AbstractContextManager[None]:
    """A context in which the compiler's partitioner saves this share of the activations of a graph."""
    import torch._functorch.config as partitioner

    _private_attribute(partitioner, "activation_memory_budget")
    settings: dict[str, Any] = {"activation_memory_budget": float(budget)}
    # torch 2.13 does not know the size of a process group, an input of a graph with collectives; it has no activations.
    if hasattr(partitioner, "unsafe_treat_script_objects_as_zero_size"):
        settings["unsafe_treat_script_objects_as_zero_size"] = True
    return _private_function(partitioner, "patch")(**settings)


def not_compiled(function: Function) -> Function:
    """A function that compiled code calls and the compiler does not trace."""
    # torch.compiler.disable would load the compiler when this module is imported; this one does at the first call.
    disabled: Any = _private_function(torch, "_disable_dynamo")(function)
    return disabled


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to each tensor of a tree, such as a model's output."""
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
