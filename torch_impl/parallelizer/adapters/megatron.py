"""Megatron-FSDP: its settings in one object, and the adapters for the two libraries that implement it."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_impl.parallelizer.mesh_axes import MeshAxes

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
ALIASES = ("params", "grads_params")  # in no release; read as optim_grads_params, which shards all that they name
EXTRA = "pip install -e '.[megatron]' in the clone"
CUDA_ONLY = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")


@dataclass(frozen=True)
class Settings:
    """The arguments of `nvfsdp_strategy_parallelize` except model, mesh, units, plan and backend."""

    data_parallel_sharding_strategy: str
    init_nvfsdp_with_meta_device: bool
    grad_reduce_in_fp32: bool
    preserve_fp32_weights: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    check_for_nan_in_grad: bool
    average_in_collective: bool
    disable_bucketing: bool
    calculate_per_token_loss: bool
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    activation_checkpointing: bool

    def __post_init__(self) -> None:
        strategy = self.data_parallel_sharding_strategy
        if strategy not in (*STRATEGIES, *ALIASES):
            choices = ", ".join(STRATEGIES)
            raise ValueError(f"data_parallel_sharding_strategy={strategy!r} is not known; use one of {choices}")
        if self.calculate_per_token_loss and self.average_in_collective:
            raise ValueError(
                "calculate_per_token_loss=True sums gradients and average_in_collective=True averages them; "
                "choose one of the two"
            )

    @property
    def strategy(self) -> str:
        """One of the four strategies, with aliases resolved."""
        name = self.data_parallel_sharding_strategy
        return STRATEGIES[0] if name in ALIASES else name

    @property
    def is_sharded(self) -> bool:
        return self.strategy != "no_shard"

    def warn_of_aliases(self) -> None:
        name = self.data_parallel_sharding_strategy
        if name in ALIASES:
            _warn(
                f"data_parallel_sharding_strategy={name!r} is in no release and is read as {STRATEGIES[0]!r}, "
                f"which shards everything that it names; the releases have {', '.join(STRATEGIES)}"
            )

    def warn_of_no_effect(self) -> None:
        """Warn of each setting that the native backend ignores; results do not depend on it."""
        for name in CUDA_ONLY:
            if getattr(self, name):
                _warn(f"{name}=True needs megatron-fsdp on CUDA; backend='native' ignores it, with the same results")
        if not self.overlap_grad_reduce:
            _warn(
                "overlap_grad_reduce=False is ignored by backend='native': reductions always overlap with the backward"
            )
        if not self.overlap_param_gather and not self.is_sharded:
            _warn("overlap_param_gather=False is ignored with no_shard, which gathers no parameter")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)


def has_function(module: str, name: str) -> bool:
    """Whether a library can be imported and has a function."""
    try:
        return hasattr(importlib.import_module(module), name)
    # An installed library raises OSError if its shared objects cannot be loaded.
    except (ImportError, OSError):
        return False


def choose_backend(backend: str, device_type: str, have_nvfsdp: bool) -> str:
    """Choose the backend by name and device; `auto` prefers a library on CUDA.

    Errors: ImportError for a library that is not installed; ValueError for one that needs CUDA.
    """
    has_cuda, have_megatron = device_type == "cuda", has_function("megatron_fsdp", "fully_shard_model")
    if backend == "auto":
        # Without CUDA `auto` uses torch's functions, with the same results; only a library asked for by name raises.
        library = "nvfsdp" if have_nvfsdp else "megatron_fsdp" if have_megatron else "native"
        return library if has_cuda else "native"
    if backend == "nvfsdp" and not have_nvfsdp:
        raise ImportError(
            "backend='nvfsdp': nvfsdp.fully_shard is not installed; use backend='megatron_fsdp' or 'native'"
        )
    if backend == "megatron_fsdp" and not have_megatron:
        raise ImportError(f"backend='megatron_fsdp': needs megatron-fsdp; {EXTRA}")
    if backend != "native" and not has_cuda:
        raise ValueError(f"backend={backend!r}: needs CUDA, and device_mesh is on {device_type!r}; use 'native'")
    return backend


def with_nvfsdp(model: nn.Module, axes: MeshAxes, settings: Settings, classes: list[type]) -> nn.Module:
    """Wrap the model by nvfsdp."""
    wrap: Any = importlib.import_module("nvfsdp").fully_shard
    return wrap(
        module=model,
        fsdp_unit_modules=classes or [type(model)],
        dp_cp_group=axes.loss_mesh.get_group(),
        data_parallel_sharding_strategy=settings.strategy,
        init_model_with_meta_device=settings.init_nvfsdp_with_meta_device,
        **_same_names(settings),
        grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
        preserve_fp32_weights=settings.preserve_fp32_weights,
        check_for_nan_in_grad=settings.check_for_nan_in_grad,
        keep_fp8_transpose_cache_when_using_custom_fsdp=settings.keep_fp8_transpose_cache_when_using_custom_fsdp,
    )


def with_megatron_fsdp(model: nn.Module, axes: MeshAxes, settings: Settings, classes: list[type]) -> nn.Module:
    """Wrap the model by megatron-fsdp; the optimizer must go through the library's `fully_shard_optimizer`."""
    library: Any = importlib.import_module("megatron_fsdp")
    # Send and accumulate gradients in one dtype, so that neither step rounds the other's result.
    reduce_dtype = torch.float32 if settings.grad_reduce_in_fp32 else None
    policy = library.MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if settings.preserve_fp32_weights else None,
        main_grads_dtype=reduce_dtype,
        grad_comm_dtype=reduce_dtype,
    )
    has_replicas = axes.replicate is not None and axes.size(axes.replicate) > 1
    # `shard_mesh` creates the flattened axis if it is needed; the library looks it up by its name.
    names = axes.shard_mesh.mesh_dim_names or (axes.shard_name,)
    return library.fully_shard_model(
        module=model,
        device_mesh=axes.mesh,
        dp_shard_dim=names[0],
        dp_outer_dim=axes.replicate if has_replicas else None,
        tp_dim=axes.tp,
        hybrid_fsdp_group=axes.loss_mesh.get_group() if has_replicas else None,
        fsdp_unit_modules=classes or [type(model)],
        zero_dp_strategy=settings.strategy,
        init_model_with_meta_device=settings.init_nvfsdp_with_meta_device,
        mixed_precision_policy=policy,
        report_nan_in_param_grad=settings.check_for_nan_in_grad,
        keep_fp8_transpose_cache=settings.keep_fp8_transpose_cache_when_using_custom_fsdp,
        **_same_names(settings),
    )


def _same_names(settings: Settings) -> dict[str, bool]:
    """The settings with the same name in both libraries."""
    names = ("overlap_grad_reduce", "overlap_param_gather", "average_in_collective", "disable_bucketing")
    names += ("calculate_per_token_loss", "nccl_ub", "fsdp_double_buffer")
    return {name: getattr(settings, name) for name in names}
