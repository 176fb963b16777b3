"""Split a model into stages, shard each stage, and build the schedule, in one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from torch_impl.contract import (
    Device,
    Dtype,
    Function,
    Instance,
    Mesh,
    Module,
    Names,
    PositiveInt,
    Rejected,
    contract,
    type_name,
)
from torch_impl.pipelining._torch_compat import reduce_each_time
from torch_impl.pipelining.model_parts import StageNames
from torch_impl.pipelining.partition import Rounding
from torch_impl.pipelining.schedule import build_schedule, choose_schedule
from torch_impl.pipelining.shapes import _get_hidden_and_vocab_size, set_shapes
from torch_impl.pipelining.split import split_model


@runtime_checkable
class ParallelizeFnProtocol(Protocol):
    """A function that shards a part of a model in place and returns None, or returns a module to replace it."""

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


ParallelizeFn = Annotated[ParallelizeFnProtocol, Instance(ParallelizeFnProtocol, "pass a function", shows_value=False)]


@contract
def pipeline_model(
    model: Module,
    world_mesh: Mesh,
    moe_mesh: Mesh | None,
    *,
    pp_axis_name: str,
    dp_axis_names: Names,
    cp_axis_name: str | None = None,
    tp_axis_name: str | None = None,
    ep_axis_name: str | None = None,
    ep_shard_axis_names: Names | None = None,
    layers_per_stage: PositiveInt | None,
    pipeline_parallel_schedule_csv: str | None,
    pipeline_parallel_schedule: str | None,
    microbatch_size: PositiveInt,
    local_batch_size: PositiveInt,
    device: Device,
    loss_fn: Function | None = None,
    parallelize_fn: ParallelizeFn | None = None,
    module_fqns_per_model_part: StageNames | None = None,
    patch_inner_model: bool = True,
    patch_causal_lm_model: bool = True,
    scale_grads: bool = False,
    round_to_pp_multiple: Rounding | None = None,
    patch_stage_backward_maybe_with_nosync: bool = False,
    seq_len: PositiveInt | None = None,
    tensor_dtype: Dtype | None = None,
    reduce_grad_per_microbatch: bool = False,
) -> tuple[Any, list[nn.Module], bool, bool, list[PipelineStage]]:
    """Split a model over a pipeline; returns (schedule, parts, has_first, has_last, stages) of this rank.

    The model is split and consumed (`split_model_into_stages`), `parallelize_fn` is called for each part, shapes are
    set if `seq_len` is passed, and the schedule is built (`build_pipeline_schedule`). `has_first` and `has_last` tell
    whether this rank has the first and the last stage. A pipeline of one rank runs the same lines.

    Gradients of sharded parts are reduced once per step, after the last micro-batch, if the part itself is an FSDP
    unit. Other parts with FSDP units are reduced after every micro-batch, unless
    `patch_stage_backward_maybe_with_nosync=True`, which rejects them. With `reduce_grad_per_microbatch=True` all parts
    are reduced after every micro-batch: no rank stores an unsharded gradient between micro-batches, and each rank
    sends its gradients and gathers its parameters once for every micro-batch.

    Cost:   only the collectives of `parallelize_fn`; for a step see `build_pipeline_schedule`.
    Errors: the errors of these functions, before the model is touched; ValueError for axes that world_mesh lacks;
            TypeError for a `parallelize_fn` that returns neither None nor a module.
    """
    # 1. Validate everything that does not need the stages.
    axes = {"dp_axis_names": tuple(dp_axis_names), "cp_axis_name": cp_axis_name, "tp_axis_name": tp_axis_name}
    for problem in _axis_problems(world_mesh, pp_axis_name, axes):
        raise Rejected(problem)
    if reduce_grad_per_microbatch and patch_stage_backward_maybe_with_nosync:
        both = "patch_stage_backward_maybe_with_nosync=True, which reduces once per step"
        raise Rejected(f"reduce_grad_per_microbatch=True and {both}; pass one of them")
    choice = choose_schedule(
        pipeline_parallel_schedule_csv,
        pipeline_parallel_schedule,
        microbatch_size,
        local_batch_size,
        world_mesh[pp_axis_name].size(),
    )
    if reduce_grad_per_microbatch and choice.splits_backward:
        problem = "reduce_grad_per_microbatch=True, and the schedule splits backward, whose halves need one gathering"
        raise Rejected(f"{problem}; pass False, or a schedule with full backwards such as 1F1B")
    # Read the sizes here, so that a config without them is an error before the model is split.
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
        shard_names = None if ep_shard_axis_names is None else tuple(ep_shard_axis_names)
        names = axes | {"ep_axis_name": ep_axis_name, "ep_shard_axis_names": shard_names}
        parts = [_parallelize(parallelize_fn, part, world_mesh, moe_mesh, names) for part in parts]
        for stage, part in zip(stages, parts, strict=True):
            # If the function returned another module, the stage must run it.
            stage.submod = part
    if patch_stage_backward_maybe_with_nosync:
        for part in parts:
            has_units = any(isinstance(module, FSDPModule) for module in part.modules())
            # torch reduces a part with nested units once per step only if the part itself is a unit.
            if has_units and not isinstance(part, FSDPModule):
                problem = f"a part of {type(part).__name__} has FSDP units and is not one"
                remedy = "fully_shard the part too, or pass False"
                raise Rejected(f"patch_stage_backward_maybe_with_nosync=True, but {problem}; {remedy}")
    if reduce_grad_per_microbatch:
        for stage in stages:
            reduce_each_time(stage)
    # 3. Set the shapes, whose dtype depends on the FSDP policy, and build the schedule.
    if sizes is not None and seq_len is not None:
        set_shapes(stages, sizes, microbatch_size, seq_len, tensor_dtype)
    schedule = build_schedule(choice, stages, loss_fn, scale_grads)
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    return schedule, parts, has_first, has_last, stages


def _parallelize(
    parallelize_fn: ParallelizeFnProtocol, part: nn.Module, world_mesh: DeviceMesh, moe_mesh: Any, names: dict[str, Any]
) -> nn.Module:
    """The part that the function has sharded, or the module that replaces it. Errors: TypeError."""
    returned = parallelize_fn(part, world_mesh, moe_mesh, **names)
    if returned is not None and not isinstance(returned, nn.Module):
        raise Rejected(f"parallelize_fn returned {type_name(returned)}; return None or a module", TypeError)
    return part if returned is None else returned


def _axis_problems(mesh: DeviceMesh, pp_axis_name: str, names_of_axes: Mapping[str, Any]) -> Iterator[str]:
    """The names that are not axes of the mesh; a flattened axis counts as an axis."""
    axes = mesh.mesh_dim_names or ()
    if pp_axis_name not in axes:
        yield f"pp_axis_name={pp_axis_name!r} is not an axis of world_mesh {axes}"
    for argument, names in names_of_axes.items():
        for axis in names if isinstance(names, (tuple, list)) else [names] if names is not None else []:
            try:
                mesh[axis]
            except KeyError:
                yield f"{argument}={names!r} are not axes of world_mesh {axes}"
