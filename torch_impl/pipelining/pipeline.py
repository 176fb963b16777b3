"""A model split into stages, sharded inside each stage, with its schedule: all of it in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from torch_impl.contract import PositiveInt, contract, type_name
from torch_impl.pipelining.partition import Rounding
from torch_impl.pipelining.schedule import build_schedule, choose_schedule
from torch_impl.pipelining.shapes import _get_hidden_and_vocab_size, set_shapes
from torch_impl.pipelining.split import split_model

NAME = "pipelining.pipeline_model"


@runtime_checkable
class ParallelizeFnProtocol(Protocol):
    """A function that shards one part of a model in place and returns None, or returns a module that replaces it."""

    def __call__(
        self,
        model: nn.Module,
        world_mesh: DeviceMesh,
        moe_mesh: DeviceMesh,
        *,
        dp_axis_names: tuple[str, ...],
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: tuple[str, ...] | None = None,
    ) -> Any: ...


@contract
def pipeline_model(
    model: nn.Module,
    world_mesh: DeviceMesh,
    moe_mesh: DeviceMesh | None,
    *,
    pp_axis_name: str,
    dp_axis_names: tuple[str, ...],
    cp_axis_name: str | None = None,
    tp_axis_name: str | None = None,
    ep_axis_name: str | None = None,
    ep_shard_axis_names: tuple[str, ...] | None = None,
    layers_per_stage: PositiveInt | None,
    pipeline_parallel_schedule_csv: str | None,
    pipeline_parallel_schedule: str | None,
    microbatch_size: PositiveInt,
    local_batch_size: PositiveInt,
    device: torch.device,
    loss_fn: Callable | None = None,
    parallelize_fn: ParallelizeFnProtocol | None = None,
    module_fqns_per_model_part: list[list[str]] | None = None,
    patch_inner_model: bool = True,
    patch_causal_lm_model: bool = True,
    scale_grads: bool = False,
    round_to_pp_multiple: Rounding | None = None,
    patch_stage_backward_maybe_with_nosync: bool = False,
    seq_len: PositiveInt | None = None,
    tensor_dtype: torch.dtype | None = None,
) -> tuple[Any, list[nn.Module], bool, bool, list[PipelineStage]]:
    """(schedule, this rank's parts, whether it has the first stage, whether it has the last, its stages).

    The model is split and consumed (`split_model_into_stages`), `parallelize_fn` is called for each part, shapes are
    set if `seq_len` is passed, and the schedule is built (`build_pipeline_schedule`). A pipeline of one rank runs the
    same lines.

    Gradients of sharded parts are reduced once per step, after the last micro-batch. torch does that for parts that are
    FSDP units themselves; `patch_stage_backward_maybe_with_nosync=True` rejects others, which are reduced each time.

    Cost:   none but what `parallelize_fn` sends; a step's is that of `build_pipeline_schedule`.
    Errors: those of these functions, before the model is touched; ValueError for axes that world_mesh lacks; TypeError
            for a `parallelize_fn` that returns neither None nor a module.
    """
    # 1. Validate everything that does not need the stages.
    if not isinstance(model, nn.Module):
        raise TypeError(f"{NAME}: model is {type_name(model)}; pass an nn.Module")
    if parallelize_fn is not None and not callable(parallelize_fn):
        raise TypeError(f"{NAME}: parallelize_fn is {type_name(parallelize_fn)}; pass a function")
    if tensor_dtype is not None and not isinstance(tensor_dtype, torch.dtype):
        raise TypeError(f"{NAME}: tensor_dtype={tensor_dtype!r} is no dtype; pass one of torch, or None")
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"{NAME}: device is {type_name(device)}; pass a torch.device")
    _check_axes(world_mesh, pp_axis_name, dp_axis_names, cp_axis_name, tp_axis_name)
    choice = choose_schedule(
        pipeline_parallel_schedule_csv,
        pipeline_parallel_schedule,
        microbatch_size,
        local_batch_size,
        world_mesh[pp_axis_name].size(),
        loss_fn,
    )
    # Here, so that a config without sizes is an error before the model is split.
    sizes = None if seq_len is None else _get_hidden_and_vocab_size(getattr(model, "config", None))
    # 2. Split the model, and shard each part.
    stages, parts = split_model(
        model,
        world_mesh,
        pp_axis_name,
        choice.rule,
        choice.file.stage_to_rank if choice.file else None,
        device,
        module_fqns_per_model_part,
        layers_per_stage,
        patch_inner_model,
        patch_causal_lm_model,
        round_to_pp_multiple,
    )
    if parallelize_fn is not None:
        names = dict(dp_axis_names=dp_axis_names, cp_axis_name=cp_axis_name, tp_axis_name=tp_axis_name)
        names |= dict(ep_axis_name=ep_axis_name, ep_shard_axis_names=ep_shard_axis_names)
        parts = [_sharded(parallelize_fn, part, world_mesh, moe_mesh, names) for part in parts]
        for stage, part in zip(stages, parts, strict=True):
            # The function may have returned another module, which the stage must run.
            stage.submod = part
    if patch_stage_backward_maybe_with_nosync:
        _check_reduced_once(parts)
    # 3. Set the shapes after sharding, whose policy decides the dtype, and build the schedule.
    if sizes is not None and seq_len is not None:
        set_shapes(stages, sizes, microbatch_size, seq_len, tensor_dtype)
    schedule = build_schedule(choice, stages, loss_fn, scale_grads)
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    return schedule, parts, has_first, has_last, stages


def _sharded(
    parallelize_fn: ParallelizeFnProtocol, part: nn.Module, world_mesh: DeviceMesh, moe_mesh: Any, names: dict[str, Any]
) -> nn.Module:
    """The part after the function has sharded it, or what replaces it. Errors: TypeError."""
    returned = parallelize_fn(part, world_mesh, moe_mesh, **names)
    if returned is not None and not isinstance(returned, nn.Module):
        raise TypeError(f"{NAME}: parallelize_fn returned {type_name(returned)}; return None or a module")
    return part if returned is None else returned


def _check_reduced_once(parts: list[nn.Module]) -> None:
    """torch reduces the gradients of a part, with nested units, once per step if the part itself is a unit. Errors:
    ValueError if it is not."""
    for part in parts:
        has_units = any(isinstance(module, FSDPModule) for module in part.modules())
        if has_units and not isinstance(part, FSDPModule):
            raise ValueError(
                f"{NAME}: patch_stage_backward_maybe_with_nosync=True, but a part of "
                f"{type(part).__name__} has FSDP units and is not one; fully_shard the part too, or pass False"
            )


def _check_axes(mesh: Any, pp: str, dp: tuple[str, ...], cp: str | None, tp: str | None) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{NAME}: world_mesh is {type_name(mesh)}; pass a DeviceMesh")
    axes = mesh.mesh_dim_names or ()
    if pp not in axes:
        raise ValueError(f"{NAME}: pp_axis_name={pp!r} is no axis of world_mesh {axes}")
    for name, names in (("dp_axis_names", dp), ("cp_axis_name", cp), ("tp_axis_name", tp)):
        for axis in names if isinstance(names, (tuple, list)) else [names] if names is not None else []:
            try:
                mesh[axis]
            except KeyError:
                raise ValueError(f"{NAME}: {name}={names!r} are not axes of world_mesh {axes}") from None
