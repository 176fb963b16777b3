"""Megatron-FSDP: its arguments in one object, and the adapters for the two libraries that have it."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from torch_impl.parallelizer.fsdp2 import checked_bool
from torch_impl.parallelizer.mesh_axes import MeshAxes

STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")
OF_THE_PAGE = ("params", "grads_params")  # names of no release; each of them is cut by optim_grads_params
BACKENDS = ("auto", "native", "megatron_fsdp", "nvfsdp")
OF_CUDA = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")


@dataclass(frozen=True)
class Settings:
    """What the page's function is told beside model, mesh, units and plan."""

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
        for field in fields(self):
            if field.name != "data_parallel_sharding_strategy":
                checked_bool(field.name, getattr(self, field.name))
        name = "data_parallel_sharding_strategy"
        strategy: Any = self.data_parallel_sharding_strategy
        if not isinstance(strategy, str):
            raise TypeError(f"{name}: is {strategy!r}, a {type(strategy).__name__}; use one of {', '.join(STRATEGIES)}")
        if strategy not in (*STRATEGIES, *OF_THE_PAGE):
            raise ValueError(f"{name}={strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
        if self.calculate_per_token_loss and self.average_in_collective:
            raise ValueError(
                "calculate_per_token_loss=True sums gradients and average_in_collective=True averages them; "
                "choose one of the two"
            )

    @property
    def strategy(self) -> str:
        """The strategy by one of its four real names."""
        name = self.data_parallel_sharding_strategy
        return STRATEGIES[0] if name in OF_THE_PAGE else name

    @property
    def is_sharded(self) -> bool:
        return self.strategy != "no_shard"

    def warn_of_aliases(self) -> None:
        name = self.data_parallel_sharding_strategy
        if name in OF_THE_PAGE:
            _warn(
                f"data_parallel_sharding_strategy={name!r} is no name of any release and is taken for "
                f"{STRATEGIES[0]!r}, which cuts all that it names; the names are {', '.join(STRATEGIES)}"
            )

    def warn_of_what_has_no_effect(self) -> None:
        """What the native backend does not do, by name; results do not depend on it."""
        for name in OF_CUDA:
            if getattr(self, name):
                _warn(f"{name}=True has no effect natively: memory and speed only, needs megatron-fsdp on CUDA")
        if not self.overlap_grad_reduce:
            _warn("overlap_grad_reduce=False has no effect natively: reductions always overlap with the backward")
        if not self.overlap_param_gather and not self.is_sharded:
            _warn("overlap_param_gather=False has no effect with no_shard: no parameter is gathered")


def checked_backend(backend: Any) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)}")
    return backend


def _warn(said: str) -> None:
    warnings.warn(said, UserWarning, stacklevel=5)


EXTRA = "pip install 'shardproof[megatron]'"


def have(module: str, name: str) -> bool:
    """Whether a library has a function, and can be imported at all."""
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, OSError):
        return False


def chosen_backend(backend: str, device_type: str, have_nvfsdp: bool) -> str:
    """The backend that a name means on a device.

    Errors: ImportError for a library that is not installed; ValueError for one that needs CUDA.
    """
    has_cuda, have_megatron = device_type == "cuda", have("megatron_fsdp", "fully_shard_model")
    if backend == "auto":
        found = "nvfsdp" if have_nvfsdp else "megatron_fsdp" if has_cuda and have_megatron else "native"
        return found if has_cuda else "native"
    if backend == "nvfsdp" and not have_nvfsdp:
        raise ImportError("backend='nvfsdp': has no nvfsdp.fully_shard; use backend='megatron_fsdp' or 'native'")
    if backend == "megatron_fsdp" and not have_megatron:
        raise ImportError(f"backend='megatron_fsdp': needs megatron-fsdp; {EXTRA}")
    if backend != "native" and not has_cuda:
        raise ValueError(f"backend={backend!r}: needs CUDA, and device_mesh is on {device_type!r}; use 'native'")
    return backend


def with_nvfsdp(model: nn.Module, axes: MeshAxes, settings: Settings, classes: list[type]) -> nn.Module:
    """The model in nvfsdp's wrapper."""
    wrap: Any = importlib.import_module("nvfsdp").fully_shard
    return wrap(
        module=model,
        fsdp_unit_modules=classes or [type(model)],
        dp_cp_group=axes.loss_mesh.get_group(),
        data_parallel_sharding_strategy=settings.strategy,
        init_model_with_meta_device=settings.init_nvfsdp_with_meta_device,
        **_alike(settings),
        grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
        preserve_fp32_weights=settings.preserve_fp32_weights,
        check_for_nan_in_grad=settings.check_for_nan_in_grad,
        keep_fp8_transpose_cache_when_using_custom_fsdp=settings.keep_fp8_transpose_cache_when_using_custom_fsdp,
    )


def with_megatron_fsdp(model: nn.Module, axes: MeshAxes, settings: Settings, classes: list[type]) -> nn.Module:
    """The model in megatron-fsdp's wrapper; an optimizer has to go through its `fully_shard_optimizer`."""
    library: Any = importlib.import_module("megatron_fsdp")
    reduced = torch.float32 if settings.grad_reduce_in_fp32 else None
    policy = library.MixedPrecisionPolicy(
        main_params_dtype=torch.float32 if settings.preserve_fp32_weights else None,
        main_grads_dtype=reduced,
        grad_comm_dtype=reduced,
    )
    has_replicas = axes.replicate is not None and axes.size(axes.replicate) > 1
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
        **_alike(settings),
    )


def _alike(settings: Settings) -> dict[str, bool]:
    """What both libraries call as the page does."""
    names = ("overlap_grad_reduce", "overlap_param_gather", "average_in_collective", "disable_bucketing")
    names += ("calculate_per_token_loss", "nccl_ub", "fsdp_double_buffer")
    return {name: getattr(settings, name) for name in names}
