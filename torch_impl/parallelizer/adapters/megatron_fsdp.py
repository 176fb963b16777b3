"""`nvfsdp_strategy_parallelize` under its newer name, with newer argument names."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import nn

from torch_impl.contract import Instance, Mesh, Module, OneOf, contract
from torch_impl.parallelizer.adapters.megatron import STRATEGIES
from torch_impl.parallelizer.adapters.nvfsdp import nvfsdp_strategy_parallelize
from torch_impl.parallelizer.adapters.unit_modules import ClassPaths
from torch_impl.parallelizer.tp_plan import Plan

STAGES = dict(enumerate(reversed(STRATEGIES)))  # ZeRO's stages; at stage 0 nothing is sharded
Optimizer = Annotated[
    torch.optim.Optimizer, Instance(torch.optim.Optimizer, "pass a torch optimizer or None", shows_value=False)
]
ZeroStage = Annotated[int | str, OneOf((*STAGES, *STRATEGIES))]


@contract
def megatron_fsdp_strategy_parallelize(
    model: Module,
    device_mesh: Mesh,
    optimizer: Optimizer | None = None,
    megatron_fsdp_unit_modules: ClassPaths | None = None,
    tp_shard_plan: Plan | None = None,
    zero_dp_strategy: ZeroStage = 3,
    init_fsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    *,
    activation_checkpointing: bool = False,
) -> tuple[nn.Module, Any]:
    """`nvfsdp_strategy_parallelize` with its newer name and arguments; returns (model, optimizer).

        zero_dp_strategy   0 no_shard    1 optim    2 optim_grads    3 optim_grads_params, or one of these names

    An `optimizer` of the model's parameters gets the sharded parameters, in the same groups; it must not have taken a
    step. `megatron_fsdp_unit_modules`, `init_fsdp_with_meta_device` and `keep_fp8_transpose_cache` are the newer names
    of `nvfsdp_unit_modules`, `init_nvfsdp_with_meta_device` and `keep_fp8_transpose_cache_when_using_custom_fsdp`.
    These arguments have the same name and meaning in both functions: `grad_reduce_in_fp32`, `preserve_fp32_weights`,
    `overlap_grad_reduce`, `overlap_param_gather`, `check_for_nan_in_grad`, `average_in_collective`,
    `disable_bucketing`, `calculate_per_token_loss`, `nccl_ub`, `fsdp_double_buffer`.

    Cost:   as the native `nvfsdp_strategy_parallelize`.
    Errors: as `nvfsdp_strategy_parallelize`; ValueError for an optimizer that has state or another model's parameters,
            before anything is changed.
    """
    names = _names_of_groups(model, optimizer)
    strategy = STAGES[zero_dp_strategy] if isinstance(zero_dp_strategy, int) else zero_dp_strategy
    parallel = nvfsdp_strategy_parallelize(
        model,
        device_mesh,
        nvfsdp_unit_modules=megatron_fsdp_unit_modules,
        tp_shard_plan=tp_shard_plan,
        data_parallel_sharding_strategy=strategy,
        init_nvfsdp_with_meta_device=init_fsdp_with_meta_device,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        preserve_fp32_weights=preserve_fp32_weights,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        check_for_nan_in_grad=check_for_nan_in_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache_when_using_custom_fsdp=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        activation_checkpointing=activation_checkpointing,
        # Use the native backend with an optimizer: a library requires its own wrapper for it.
        backend="auto" if optimizer is None else "native",
    )
    for group, of_group in zip(() if optimizer is None else optimizer.param_groups, names, strict=True):
        group["params"] = [parallel.get_parameter(name) for name in of_group]
    return parallel, optimizer


def _names_of_groups(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[list[str]]:
    """The parameter names of each group of an optimizer. Errors: ValueError."""
    if optimizer is None:
        return []
    if optimizer.state:
        raise ValueError(
            "optimizer: has state of parameters that are not sharded yet; parallelize before the first step"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: Any = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group):
        raise ValueError("optimizer: has a parameter that is not in the model; make it from model.parameters()")
    return groups
