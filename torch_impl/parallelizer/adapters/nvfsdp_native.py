"""The contract of Megatron-FSDP on torch's own `fully_shard` and `replicate`."""

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
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.collectives import accumulator
from torch_impl.parallelizer._torch_compat import (
    after_backward,
    flattened,
    largest_magnitudes,
    map_tensors,
    replicate_module,
)
from torch_impl.parallelizer.adapters.megatron import Settings
from torch_impl.parallelizer.adapters.meta_init import materialize, shared_seed
from torch_impl.parallelizer.blocks import checkpoint_blocks, grouped
from torch_impl.parallelizer.fsdp2 import return_no_views
from torch_impl.parallelizer.mesh_axes import MeshAxes
from torch_impl.parallelizer.tp_plan import cut_modules, styled_modules

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


def check_after_backward(model: nn.Module, group: ProcessGroup) -> None:
    """From now on each backward through the model's output ends with the check, over the ranks of a group.

    To be called after FSDP has taken the model, whose reductions then come first. A backward that reduces nothing, as
    all but the last of an accumulation, is not looked at.

    Cost:   1 all_reduce of 4 bytes for each backward, and one wait for the device.
    Errors: FloatingPointError from `backward` on every rank, naming the first parameter in the order of names.
    """
    model.register_forward_hook(_Watch(model, group))


class _Watch:
    """Asks, once a backward has begun, for the check at its end."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        self._model, self._group, self._is_asked = model, group, False

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._is_asked = False  # where the last backward did not come to its end
        map_tensors(lambda x: x.register_hook(self._ask) if x.requires_grad else x, output)

    def _ask(self, gradient: Tensor) -> None:
        if not self._is_asked:
            self._is_asked = True
            after_backward(self._check)

    def _check(self) -> None:
        self._is_asked = False
        named = sorted((name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None)
        if not named:
            return
        worst = _not_finite([gradient for _, gradient in named])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        place = int(worst)
        if place:
            name = named[len(named) - place][0]
            raise FloatingPointError(
                f"check_for_nan_in_grad: the gradient of {name!r} is not finite on some rank; no step was taken, look "
                "at the loss of each rank and at the learning rate"
            )


def _not_finite(gradients: list[Tensor]) -> Tensor:
    """0 if this rank's parts of all gradients are finite; else how many stand from the first that is not to the end."""
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    held = [number for number, gradient in enumerate(local) if gradient.numel()]
    device = local[0].device
    if not held:
        return torch.zeros((), dtype=torch.int32, device=device)
    wide = accumulator(max((local[number].dtype for number in held), key=lambda dtype: dtype.itemsize))
    magnitudes = torch.stack([each.to(wide) for each in largest_magnitudes([local[number] for number in held])])
    to_the_end = torch.tensor([len(local) - number for number in held], dtype=torch.int32, device=device)
    return torch.where(magnitudes.isfinite(), 0, to_the_end).max()
