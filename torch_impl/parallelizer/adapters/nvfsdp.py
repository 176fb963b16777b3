"""Megatron-FSDP under the name nvfsdp: the library on CUDA, torch's own functions elsewhere."""

from __future__ import annotations

from typing import Literal

from torch import nn

from torch_impl.contract import Mesh, Module, contract
from torch_impl.parallelizer.adapters import nvfsdp_native
from torch_impl.parallelizer.adapters.megatron import (
    Settings,
    choose_backend,
    has_function,
    with_megatron_fsdp,
    with_nvfsdp,
)
from torch_impl.parallelizer.adapters.meta_init import check_meta
from torch_impl.parallelizer.adapters.unit_modules import (
    ClassPaths,
    import_classes,
    parameter_owners,
    unit_instances,
)
from torch_impl.parallelizer.blocks import checkpoint_blocks
from torch_impl.parallelizer.fsdp2 import validate_target
from torch_impl.parallelizer.tp_plan import Plan, shard_modules

HAVE_NVFSDP: bool = has_function("nvfsdp", "fully_shard")


@contract
def nvfsdp_strategy_parallelize(
    model: Module,
    device_mesh: Mesh,
    nvfsdp_unit_modules: ClassPaths | None = None,
    tp_shard_plan: Plan | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    *,
    activation_checkpointing: bool = False,
    backend: Literal["auto", "native", "megatron_fsdp", "nvfsdp"] = "auto",
) -> nn.Module:
    """Parallelize a model over a mesh like Megatron-FSDP: tensor plan, checkpointing, data parallelism.

        ids  "b/dp s"   ->   logits  "b/dp s v"         the same on each tp rank

    `backend="auto"` uses nvfsdp or megatron-fsdp if one is installed and the mesh is on CUDA. Otherwise it is native:
    in place, with torch's `fully_shard` and `replicate` and their memory between steps. With megatron-fsdp the
    optimizer must go through its `fully_shard_optimizer`. Axes of the mesh are identified by name, see `mesh_axes`.
    Every `data_parallel_sharding_strategy` gives the same gradients and weights:

        optim_grads_params   all sharded, gathered again in backward    optim        as optim_grads, reduced where
        optim_grads          all sharded, gathered until backward                    gradient sync is on
        no_shard             all replicated, gradients all-reduced

    nvfsdp_unit_modules    paths of classes; each outermost instance is a unit. None: the full model is one unit.
    init_nvfsdp_with_meta_device   initialise a model on meta, one unit at a time at full size, then shard. Values
        depend on the first rank's seed and the modules' names only, not on the mesh.
    grad_reduce_in_fp32    reduce in float32 or wider; else in the dtype of the computation.
    preserve_fp32_weights  float32 masters of 16-bit parameters, which compute in 16 bits; the state dict is float32.
    overlap_param_gather   gather one unit ahead in forward, two in backward.
    check_for_nan_in_grad  FloatingPointError from `backward` on every rank, with the name of the first bad parameter.
    average_in_collective  average in the collective; else sum and divide once.
    disable_bucketing      each module with parameters of its own is a unit.
    calculate_per_token_loss   gradients are summed over the data ranks, not averaged.

    In the native backend `overlap_grad_reduce=False`, `nccl_ub`, `fsdp_double_buffer` and
    `keep_fp8_transpose_cache_when_using_custom_fsdp` have no effect and give a warning.

    Cost:   see `fsdp2_strategy_parallelize`; no_shard: 1 all_reduce of each unit. The check: 1 all_reduce of 4 bytes
            for each backward over all axes but pp, and one wait for the device. Meta: 1 broadcast of 8 bytes per axis.
    Errors: before anything is changed. As `check_plan` and `mesh_axes`; ValueError for several ep ranks, an unknown
            strategy or backend, a class without an instance, a unit of two dtypes, a model that is on meta and should
            not be or the other way round, a tie across units of one module, averaging a sum; ImportError for a backend
            whose library is not installed; TypeError for a switch that is not a bool.
    Source: arXiv 1910.02054 (ZeRO).
    """
    # 1. Validate everything, before anything is changed or sent.
    settings = Settings(
        data_parallel_sharding_strategy,
        init_nvfsdp_with_meta_device,
        grad_reduce_in_fp32,
        preserve_fp32_weights,
        overlap_grad_reduce,
        overlap_param_gather,
        check_for_nan_in_grad,
        average_in_collective,
        disable_bucketing,
        calculate_per_token_loss,
        keep_fp8_transpose_cache_when_using_custom_fsdp,
        nccl_ub,
        fsdp_double_buffer,
        activation_checkpointing,
    )
    axes, styles = validate_target(model, device_mesh, tp_shard_plan, is_sharded=settings.is_sharded)
    if axes.size(axes.ep) > 1:
        raise ValueError(
            f"device_mesh: ep={axes.size(axes.ep)}; experts are sharded by fsdp2_strategy_parallelize alone"
        )
    backend_name = choose_backend(backend, device_mesh.device_type, HAVE_NVFSDP)
    classes = import_classes("nvfsdp_unit_modules", nvfsdp_unit_modules or [])
    instances = unit_instances(model, classes, nvfsdp_unit_modules or [])
    check_meta(model, is_expected=init_nvfsdp_with_meta_device)
    settings.warn_of_aliases()
    # 2. Use torch's functions, unit after unit.
    if backend_name == "native":
        units = nvfsdp_native.units_of(model, parameter_owners(model) if disable_bucketing else instances)
        settings.warn_of_no_effect()
        nvfsdp_native.parallelize(model, axes, styles, settings, units)
        return model
    # 3. Or use a library's wrapper, which does everything except the tensor plan and checkpointing.
    if axes.tp_mesh is not None:
        shard_modules(model, styles, axes.tp_mesh)
    if activation_checkpointing:
        checkpoint_blocks(model)
    # Return the wrapper, which is a different module from the model.
    wrap = with_nvfsdp if backend_name == "nvfsdp" else with_megatron_fsdp
    return wrap(model, axes, settings, classes)
