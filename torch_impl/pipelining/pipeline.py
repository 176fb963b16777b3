"""A model, cut, sharded inside its stages, with its schedule: all of it in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from torch_impl.pipelining.arguments import check_positive, check_switch
from torch_impl.pipelining.schedule import build_pipeline_schedule, check_schedule_arguments
from torch_impl.pipelining.shapes import _get_hidden_and_vocab_size, _precompute_stage_shapes
from torch_impl.pipelining.split import split_model_into_stages

NAME = "pipeline_model"


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
    layers_per_stage: int | None,
    pipeline_parallel_schedule_csv: str | None,
    pipeline_parallel_schedule: str | None,
    microbatch_size: int,
    local_batch_size: int,
    device: torch.device,
    loss_fn: Callable | None = None,
    parallelize_fn: ParallelizeFnProtocol | None = None,
    module_fqns_per_model_part: list[list[str]] | None = None,
    patch_inner_model: bool = True,
    patch_causal_lm_model: bool = True,
    scale_grads: bool = False,
    round_to_pp_multiple: str | None = None,
    patch_stage_backward_maybe_with_nosync: bool = False,
    seq_len: int | None = None,
    tensor_dtype: torch.dtype | None = None,
) -> tuple[Any, list[nn.Module], bool, bool, list[PipelineStage]]:
    """(schedule, this rank's parts, whether it has the first stage, whether it has the last, its stages).

    The model is cut and used up (`split_model_into_stages`), `parallelize_fn` is called for each part, shapes are told
    if `seq_len` is given, and the schedule is built (`build_pipeline_schedule`). A pipeline of one rank runs the same.

    Gradients of sharded parts are reduced once per step, after the last micro-batch. torch does that for parts that are
    FSDP units themselves; `patch_stage_backward_maybe_with_nosync=True` refuses others, which are reduced each time.

    Cost:   none but what `parallelize_fn` sends; a step's is that of `build_pipeline_schedule`.
    Errors: as of these functions, before the model is touched; ValueError for axes that world_mesh has not; TypeError
            for a `parallelize_fn` that returns neither None nor a module.
    """
    check_switch(NAME, "patch_stage_backward_maybe_with_nosync", patch_stage_backward_maybe_with_nosync)
    if seq_len is not None:
        check_positive(NAME, "seq_len", seq_len)
    if parallelize_fn is not None and not callable(parallelize_fn):
        raise TypeError(f"pipelining.{NAME}: parallelize_fn is a {type(parallelize_fn).__name__}; pass a function")
    _check_axes(world_mesh, pp_axis_name, dp_axis_names, cp_axis_name, tp_axis_name)
    check_schedule_arguments(
        pipeline_parallel_schedule_csv,
        pipeline_parallel_schedule,
        microbatch_size,
        local_batch_size,
        world_mesh[pp_axis_name].size(),
        loss_fn,
        scale_grads,
    )
    config = getattr(model, "config", None)
    if seq_len is not None:
        _get_hidden_and_vocab_size(config)
    if tensor_dtype is not None and not isinstance(tensor_dtype, torch.dtype):
        raise TypeError(f"pipelining.{NAME}: tensor_dtype={tensor_dtype!r} is no dtype; pass one of torch, or None")
    stages, parts = split_model_into_stages(
        model,
        world_mesh,
        pp_axis_name,
        pipeline_parallel_schedule,
        device,
        module_fqns_per_model_part,
        layers_per_stage,
        patch_inner_model,
        patch_causal_lm_model,
        round_to_pp_multiple,
        pipeline_parallel_schedule_csv=pipeline_parallel_schedule_csv,
    )
    if parallelize_fn is not None:
        names = dict(dp_axis_names=dp_axis_names, cp_axis_name=cp_axis_name, tp_axis_name=tp_axis_name)
        names |= dict(ep_axis_name=ep_axis_name, ep_shard_axis_names=ep_shard_axis_names)
        parts = [_sharded(parallelize_fn, part, world_mesh, moe_mesh, names) for part in parts]
        for stage, part in zip(stages, parts, strict=True):
            stage.submod = part
    if patch_stage_backward_maybe_with_nosync:
        _check_reduced_once(parts)
    if seq_len is not None:
        _precompute_stage_shapes(stages, config, microbatch_size, seq_len, tensor_dtype=tensor_dtype)
    schedule = build_pipeline_schedule(
        pipeline_parallel_schedule_csv,
        pipeline_parallel_schedule,
        microbatch_size,
        local_batch_size,
        stages,
        loss_fn,
        scale_grads,
    )
    has = [any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last")]
    return schedule, parts, has[0], has[1], stages


def _sharded(
    parallelize_fn: ParallelizeFnProtocol, part: nn.Module, world_mesh: DeviceMesh, moe_mesh: Any, names: dict[str, Any]
) -> nn.Module:
    """The part, or what the function puts in its place."""
    returned = parallelize_fn(part, world_mesh, moe_mesh, **names)
    if returned is not None and not isinstance(returned, nn.Module):
        raise TypeError(
            f"pipelining.{NAME}: parallelize_fn returned a {type(returned).__name__}; return None or a module"
        )
    return part if returned is None else returned


def _check_reduced_once(parts: list[nn.Module]) -> None:
    """torch reduces the gradients of a part once per step, nested units included, where the part is a unit itself."""
    for part in parts:
        has_units = any(isinstance(module, FSDPModule) for module in part.modules())
        if has_units and not isinstance(part, FSDPModule):
            raise ValueError(
                f"pipelining.{NAME}: patch_stage_backward_maybe_with_nosync=True, but a part of "
                f"{type(part).__name__} has FSDP units and is none; fully_shard the part too, or pass False"
            )


def _check_axes(mesh: Any, pp: str, dp: tuple[str, ...], cp: str | None, tp: str | None) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"pipelining.{NAME}: world_mesh is a {type(mesh).__name__}; pass a DeviceMesh")
    axes = mesh.mesh_dim_names or ()
    if pp not in axes:
        raise ValueError(f"pipelining.{NAME}: pp_axis_name={pp!r} is no axis of world_mesh {axes}")
    for name, given in (("dp_axis_names", dp), ("cp_axis_name", cp), ("tp_axis_name", tp)):
        for axis in given if isinstance(given, (tuple, list)) else [given] if given is not None else []:
            try:
                mesh[axis]
            except KeyError:
                raise ValueError(f"pipelining.{NAME}: {name}={given!r} are not axes of world_mesh {axes}") from None


@runtime_checkable
class ParallelizeFnProtocol(Protocol):
    """Works in place and returns None, or returns a module that takes the part's place."""

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
