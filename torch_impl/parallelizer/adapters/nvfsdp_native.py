"""Megatron-FSDP with torch's `fully_shard` and `replicate`, and its check that gradients are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_impl.collectives import accumulator
from torch_impl.parallelizer._torch_compat import (
    after_backward,
    flatten,
    largest_magnitudes,
    map_tensors,
    replicate_module,
)
from torch_impl.parallelizer.adapters.megatron import Settings
from torch_impl.parallelizer.adapters.meta_init import materialize, shared_seed
from torch_impl.parallelizer.blocks import checkpoint_blocks, groups_by_parameters
from torch_impl.parallelizer.fsdp2 import untangle_views
from torch_impl.parallelizer.mesh_axes import MeshAxes
from torch_impl.parallelizer.tp_plan import Styles, shard_modules

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: the modules passed to FSDP, all modules inside them by name, and their dtype."""

    heads: list[nn.Module]
    modules: dict[str, nn.Module]
    dtype: torch.dtype | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        unique = {id(p): p for module in self.modules.values() for p in module.parameters(recurse=False)}
        return list(unique.values())


def units_of(model: nn.Module, heads: Sequence[nn.Module]) -> list[Unit]:
    """The units in the model's order, then the root with the rest. Errors: ValueError for two dtypes in one unit."""
    groups = [] if any(module is model for module in heads) else groups_by_parameters(model, list(heads))
    number_of = {id(inner): n for n, group in enumerate(groups) for head in group for inner in head.modules()}
    modules: list[dict[str, nn.Module]] = [{} for _ in range(len(groups) + 1)]
    for name, module in model.named_modules():
        modules[number_of.get(id(module), len(groups))][name] = module
    return [Unit(group, inside, _dtype(inside)) for group, inside in zip([*groups, [model]], modules, strict=True)]


def _dtype(modules: Mapping[str, nn.Module]) -> torch.dtype | None:
    dtypes = {
        f"{name}.{leaf}": parameter.dtype
        for name, module in modules.items()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point()
    }
    if len(set(dtypes.values())) > 1:
        (first, one), *rest = dtypes.items()
        second, two = next((name, dtype) for name, dtype in rest if dtype != one)
        raise ValueError(
            f"model: {first!r} is {one} and {second!r} is {two}, both in one unit, which has one dtype; choose "
            "nvfsdp_unit_modules that separate them, or one dtype"
        )
    return next(iter(dtypes.values()), None)


def parallelize(model: nn.Module, axes: MeshAxes, styles: Styles, settings: Settings, units: list[Unit]) -> None:
    """Parallelize the units one after another, then apply the settings for all units together."""
    mesh = axes.fsdp_mesh if settings.is_sharded else axes.loss_mesh
    seed = shared_seed(axes.mesh) if settings.init_nvfsdp_with_meta_device else 0
    if settings.activation_checkpointing:
        checkpoint_blocks(model)
    for unit in units:
        # 1. Initialise at full size one unit at a time, so that no rank ever needs memory for the full model.
        if settings.init_nvfsdp_with_meta_device:
            materialize(model, unit.modules.items(), _device(axes.mesh), seed)
        # 2. Make float32 masters before sharding: FSDP casts shards to the compute dtype when it gathers them.
        if settings.preserve_fp32_weights and unit.dtype in NARROW:
            for parameter in unit.parameters:
                parameter.data = parameter.data.float()
        # 3. Apply tensor parallelism, then FSDP or replication.
        if axes.tp_mesh is not None:
            shard_modules(model, {name: styles[name] for name in unit.modules if name in styles}, axes.tp_mesh)
            for head in unit.heads:
                untangle_views(head)
        _shard_unit(unit, mesh, settings)
    _configure_units(model, [unit.heads[0] for unit in units[:-1]], settings)
    if settings.check_for_nan_in_grad:
        check_after_backward(model, _backward_mesh(axes.mesh).get_group())


def _shard_unit(unit: Unit, mesh: DeviceMesh, settings: Settings) -> None:
    has_masters = settings.preserve_fp32_weights and unit.dtype in NARROW
    reduce_dtype = (
        torch.promote_types(unit.dtype, torch.float32) if settings.grad_reduce_in_fp32 and unit.dtype else None
    )
    policy = MixedPrecisionPolicy(param_dtype=unit.dtype if has_masters else None, reduce_dtype=reduce_dtype)
    if not settings.is_sharded:
        for module in unit.heads:
            replicate_module(module, mesh, policy)
        return
    heads = unit.heads if len(unit.heads) > 1 else unit.heads[0]
    fully_shard(heads, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.strategy == "optim_grads_params")


def _configure_units(model: nn.Module, units: list[nn.Module], settings: Settings) -> None:
    """Averaging or summing of all units, and the order in which they are prefetched."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(not settings.average_in_collective)
            if settings.calculate_per_token_loss:
                module.set_gradient_divide_factor(1.0)
    if settings.overlap_param_gather and settings.is_sharded:
        sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
        # Backward runs in reverse: the unit before this one is needed first, then the one before that.
        for number, unit in enumerate(sharded):
            unit.set_modules_to_forward_prefetch(sharded[number + 1 : number + 2])
            unit.set_modules_to_backward_prefetch(sharded[max(0, number - 2) : number][::-1])


def _backward_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks that take part in one backward: every axis but the pipeline's."""
    names = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    return mesh[names[0]] if len(names) == 1 else flatten(mesh[tuple(names)], "one_backward")


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


# ---- check_for_nan_in_grad


def check_after_backward(model: nn.Module, group: ProcessGroup) -> None:
    """Check at the end of each backward through the model's output that all gradients are finite on every rank.

    Call it after FSDP has wrapped the model, so that FSDP's reductions come first. A backward that reduces nothing (all
    but the last of an accumulation) is not checked.

    Cost:   1 all_reduce of 4 bytes for each backward, and one wait for the device.
    Errors: FloatingPointError from `backward` on every rank, after their exchange, with the first parameter in the
            order of names.
    """
    model.register_forward_hook(_GradientCheck(model, group))


class _GradientCheck:
    """A forward hook that queues one check for the end of the backward through the output."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._model, self._group, self._is_queued = model, group, False

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._is_queued = False  # a backward that raised has queued a check that never ran
        map_tensors(lambda x: x.register_hook(self._queue) if x.requires_grad else x, output)

    def _queue(self, gradient: Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            after_backward(self._check)

    def _check(self) -> None:
        self._is_queued = False
        gradients = sorted((name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None)
        if not gradients:
            return
        # Every rank raises for the first name that is not finite on any rank, which has the largest distance from the
        # end.
        distance = _distance_from_end([gradient for _, gradient in gradients])
        dist.all_reduce(distance, op=dist.ReduceOp.MAX, group=self._group)
        from_end = int(distance)
        if from_end:
            name = gradients[len(gradients) - from_end][0]
            raise FloatingPointError(
                f"check_for_nan_in_grad: the gradient of {name!r} is not finite on some rank; no step was taken, look "
                "at the loss of each rank and at the learning rate"
            )


def _distance_from_end(gradients: list[Tensor]) -> Tensor:
    """The number of gradients from the first that is not finite on this rank to the last; 0 if all are finite."""
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    # A rank's shard of a small parameter may be empty and has no largest magnitude.
    filled = [number for number, shard in enumerate(shards) if shard.numel()]
    device = shards[0].device
    if not filled:
        return torch.zeros((), dtype=torch.int32, device=device)
    wide = accumulator(max((shards[number].dtype for number in filled), key=lambda dtype: dtype.itemsize))
    magnitudes = torch.stack([each.to(wide) for each in largest_magnitudes([shards[number] for number in filled])])
    from_end = torch.tensor([len(shards) - number for number in filled], dtype=torch.int32, device=device)
    return torch.where(magnitudes.isfinite(), 0, from_end).max()
