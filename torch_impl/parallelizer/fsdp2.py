"""Fully sharded data parallelism by torch's `fully_shard`, after tensor parallelism.

Between steps a rank holds 1/n of every parameter, its gradient and its optimizer's state, n = dp_shard * cp. A block is
whole while it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from torch_impl.parallelizer._torch_compat import map_tensors
from torch_impl.parallelizer.blocks import checkpoint_blocks, units
from torch_impl.parallelizer.mesh_axes import MeshAxes, mesh_axes
from torch_impl.parallelizer.tp_plan import apply_plan, check_kinds, check_plan


def return_no_views(model: nn.Module) -> None:
    """Have the model return no views, in place; to be called before FSDP takes the model. Nothing is copied."""
    model.register_forward_hook(_owned)


def _owned(module: nn.Module, arguments: Any, output: Any) -> Any:
    return map_tensors(lambda x: _Own.apply(x) if x._is_view() and x.requires_grad else x, output)


class _Own(torch.autograd.Function):
    """The same memory under another tensor, with its version: autograd still sees an edit of what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


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


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    tp_shard_plan: dict[str, RowwiseParallel | ColwiseParallel | SequenceParallel] | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    *,
    activation_checkpointing: bool = False,
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Cut a model over a mesh, in place: tensor plan, activation checkpointing, FSDP. Returns the model.

        ids  "b/dp s"   ->   logits  "b/dp s v"         whole on each tp rank
        parameter "o i"   ->   "o/dp i", or as its style cuts it over tp and then "/dp" on its first dim

    Axes are found by name: see `mesh_axes`. With replicas (`dp_replicate`) parameters are sharded inside one. The
    gradient is the mean over dp_replicate x dp_shard x cp, so that a rank's loss is to be
    dp * cp * sum(its token losses) / N, with N the tokens of the whole step; accumulation needs no division either.

    `mp_policy=None` computes in bfloat16 and reduces in float32; a model with float64 parameters stays float64.
    `output_dtype` is the model's, not that of each block. Buffers keep their dtype. Units are the elements of lists of
    layers (`units`), and the model with what is left. `reshard_after_forward=None` keeps only the last block whole
    between forward and backward; under a pipeline pass False, or each microbatch gathers again. `offload_policy` keeps
    shards in host memory, pinned where the mesh has an accelerator. What was one parameter stays one.

    Cost:   for a unit of parameters w, its first dims rounded up to multiples of n:
            forward 1 all_gather, handing in |w|/n of `param_dtype`; backward the same again if it was freed, and
            1 reduce_scatter, handing in |w| of `reduce_dtype`; with replicas 1 all_reduce of |w|/n.
            `set_requires_gradient_sync(False)` leaves out reduction. On construction, see `apply_plan`.
    Errors: before anything is changed. TypeError for a model, mesh, policy, plan or switch of another kind.
            ValueError for a mesh whose axes are unknown, mixed or have no names; for a model that is parallel already;
            for what `check_plan` refuses.
    Source: arXiv 2304.11277 (FSDP), 1909.08053 (tensor parallelism), 1604.06174 (checkpointing).
    """
    checked_bool("activation_checkpointing", activation_checkpointing)
    if reshard_after_forward is not None:
        checked_bool("reshard_after_forward", reshard_after_forward)
    axes = checked_axes(model, device_mesh, tp_shard_plan)
    policy, offload = _policy(model, mp_policy), _offload(device_mesh, offload_policy)
    mesh = axes.fsdp_mesh
    if axes.tp_mesh is not None:
        apply_plan(model, tp_shard_plan, axes.tp_mesh)
        return_no_views(model)
    if activation_checkpointing:
        checkpoint_blocks(model)
    _shard(model, mesh, policy, offload, reshard_after_forward)
    return model


def _shard(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | None,
) -> None:
    """Each unit, then the root with what is left."""
    inner, groups = replace(policy, output_dtype=None), units(model)
    for group in groups:
        frees = group is not groups[-1] if reshard_after_forward is None else reshard_after_forward
        module = group if len(group) > 1 else group[0]
        fully_shard(module, mesh=mesh, mp_policy=inner, offload_policy=offload, reshard_after_forward=frees)
    frees = True if reshard_after_forward is None else reshard_after_forward
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=frees)


def _policy(model: nn.Module, given: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """What was given; else bfloat16 with float32 sums, and nothing narrower than it is for a float64 model."""
    if given is not None and not isinstance(given, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: is a {type(given).__name__}; pass a MixedPrecisionPolicy or None")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(given, name, None)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"mp_policy: its {name} is {dtype!r}; pass a dtype of floats or None")
    if given is not None:
        return given
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offload(device_mesh: DeviceMesh, given: OffloadPolicy | None) -> OffloadPolicy:
    """What was given, without pinned memory where there is no accelerator to pin it for."""
    if given is not None and not isinstance(given, OffloadPolicy):
        raise TypeError(f"offload_policy: is a {type(given).__name__}; pass a CPUOffloadPolicy or None")
    if isinstance(given, CPUOffloadPolicy) and given.pin_memory and device_mesh.device_type == "cpu":
        return replace(given, pin_memory=False)
    return OffloadPolicy() if given is None else given
