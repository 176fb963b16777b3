"""The contract of Megatron-FSDP on torch's own `fully_shard` and `replicate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer._torch_compat import flattened, replicate_module
from torch_impl.parallelizer.activation_checkpointing import checkpoint_blocks
from torch_impl.parallelizer.finite_gradients import check_after_backward
from torch_impl.parallelizer.mesh_axes import MeshAxes
from torch_impl.parallelizer.meta_init import materialize, shared_seed
from torch_impl.parallelizer.nvfsdp_settings import Settings
from torch_impl.parallelizer.own_output import return_no_views
from torch_impl.parallelizer.plan_keys import styled_modules
from torch_impl.parallelizer.tp_plan import cut_modules
from torch_impl.parallelizer.units import grouped

NARROW = (torch.bfloat16, torch.float16)
Plan = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class Part:
    """What is sharded as one unit: the modules given to FSDP, all inside them by name, and what they compute in."""

    heads: list[nn.Module]
    inside: dict[str, nn.Module]
    dtype: torch.dtype | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        own = {id(p): p for module in self.inside.values() for p in module.parameters(recurse=False)}
        return list(own.values())


def parts_of(model: nn.Module, chosen: Sequence[nn.Module]) -> list[Part]:
    """The units in the model's order, and the root with what is left. Errors: ValueError for two dtypes in one."""
    groups = [] if any(module is model for module in chosen) else grouped(model, list(chosen))
    taken = {id(module): number for number, group in enumerate(groups) for each in group for module in each.modules()}
    inside: list[dict[str, nn.Module]] = [{} for _ in range(len(groups) + 1)]
    for name, module in model.named_modules():
        inside[taken.get(id(module), len(groups))][name] = module
    return [Part(heads, held, _dtype(held)) for heads, held in zip([*groups, [model]], inside, strict=True)]


def _dtype(inside: Mapping[str, nn.Module]) -> torch.dtype | None:
    named = {
        f"{name}.{leaf}": parameter.dtype
        for name, module in inside.items()
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point()
    }
    if len(set(named.values())) > 1:
        (first, one), *others = named.items()
        second, two = next((name, dtype) for name, dtype in others if dtype != one)
        raise ValueError(
            f"model: {first!r} is {one} and {second!r} is {two}, both in one unit, which has one dtype; choose "
            "nvfsdp_unit_modules that keep them apart, or one dtype"
        )
    return next(iter(named.values()), None)


def parallelize(model: nn.Module, axes: MeshAxes, plan: Plan | None, settings: Settings, parts: list[Part]) -> None:
    """Unit after unit: values, float32 masters, tensor plan, sharding. Then what the settings say of all of them."""
    mesh = axes.fsdp_mesh if settings.is_sharded else axes.loss_mesh
    styled = styled_modules(model, plan or {})
    seed = shared_seed(axes.mesh) if settings.init_nvfsdp_with_meta_device else 0
    if settings.activation_checkpointing:
        checkpoint_blocks(model)
    for part in parts:
        if settings.init_nvfsdp_with_meta_device:
            materialize(model, part.inside.items(), _device(axes.mesh), seed)
        if settings.preserve_fp32_weights and part.dtype in NARROW:
            for parameter in part.parameters:
                parameter.data = parameter.data.float()
        if axes.tp_mesh is not None:
            cut_modules(model, {name: styled[name] for name in part.inside if name in styled}, axes.tp_mesh)
            for head in part.heads:
                return_no_views(head)
        _shard(part, mesh, settings)
    _tell_units(model, [part.heads[0] for part in parts[:-1]], settings)
    if settings.check_for_nan_in_grad:
        check_after_backward(model, _everyone(axes.mesh).get_group())


def _shard(part: Part, mesh: DeviceMesh, settings: Settings) -> None:
    keeps_masters = settings.preserve_fp32_weights and part.dtype in NARROW
    reduced = torch.promote_types(part.dtype, torch.float32) if settings.grad_reduce_in_fp32 and part.dtype else None
    policy = MixedPrecisionPolicy(param_dtype=part.dtype if keeps_masters else None, reduce_dtype=reduced)
    if not settings.is_sharded:
        for module in part.heads:
            replicate_module(module, mesh, policy)
        return
    heads = part.heads if len(part.heads) > 1 else part.heads[0]
    fully_shard(heads, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.strategy == "optim_grads_params")


def _tell_units(model: nn.Module, units: list[nn.Module], settings: Settings) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(not settings.average_in_collective)
            if settings.calculate_per_token_loss:
                module.set_gradient_divide_factor(1.0)
    if settings.overlap_param_gather and settings.is_sharded:
        sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
        for number, unit in enumerate(sharded):
            unit.set_modules_to_forward_prefetch(sharded[number + 1 : number + 2])
            unit.set_modules_to_backward_prefetch(sharded[max(0, number - 2) : number][::-1])


def _everyone(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks that take part in one backward: every axis but the pipeline's."""
    names = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    return mesh[names[0]] if len(names) == 1 else flattened(mesh[tuple(names)], "one_backward")


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
