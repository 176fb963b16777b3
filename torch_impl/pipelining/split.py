"""Split a model into stages: choose each stage's modules and rank, and build a module for each stage of this rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from torch_impl.contract import Device, Mesh, Module, NonNegative, PositiveInt, Rejected, contract
from torch_impl.pipelining.csv_schedule import read_csv
from torch_impl.pipelining.model_parts import (
    ModelParts,
    StageNames,
    complete_names,
    model_parts,
    split_problems,
)
from torch_impl.pipelining.named_schedules import Rule, rule_of, stages_problem
from torch_impl.pipelining.partition import Rounding, calculate_virtual_stages, ranks_of_stages
from torch_impl.pipelining.stage_module import consume, run_as_family, run_head, shell
from torch_impl.pipelining.tied_weights import copy_tied_weights, tied_weights_across


@contract
def split_model_into_stages(
    model: Module,
    pp_mesh: Mesh,
    pp_axis_name: str,
    pp_schedule: str | None,
    device: Device,
    module_names_per_stage: StageNames | None = None,
    layers_per_stage: PositiveInt | None = None,
    patch_inner_model: bool = True,
    patch_causal_lm_model: bool = True,
    round_to_pp_multiple: Rounding | None = None,
    *,
    pipeline_parallel_schedule_csv: str | None = None,
    embed_cost: NonNegative = 0.0,
    head_cost: NonNegative = 0.0,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """Split a model into stages; returns this rank's stages and their modules, ascending. The model is consumed.

    Modules move to the stages, and parameters keep their names. A module that a stage does not have becomes None, or is
    missing from the dict that replaces the list of layers; modules of other ranks are freed with the model. The rank of
    each stage comes from the schedule's file if one is passed, else from the schedule's placement. A stage takes ids if
    it has the embedding, else hidden states; it returns logits if it has the head, else hidden states.

    A parameter that two stages share becomes two, listed in `stage.tied_copies`; schedules of
    `build_pipeline_schedule` sum their gradients, so they stay equal. A norm of the gradients must count one of them.

    Cost:   none between ranks; only parameters that two stages of this rank share are copied.
    Errors: TypeError for a wrong type; ValueError for an axis that the mesh lacks, stages that the schedule or the
            ranks cannot have, names that the model lacks or that do not cover its layers in order, parameters on no
            stage or on two.
    """
    if pp_axis_name not in (pp_mesh.mesh_dim_names or ()):
        raise Rejected(f"pp_axis_name={pp_axis_name!r} is not an axis of pp_mesh {pp_mesh.mesh_dim_names}")
    if pp_schedule is None and pipeline_parallel_schedule_csv is None:
        raise Rejected("pp_schedule=None and pipeline_parallel_schedule_csv=None; pass one")
    rule = None if pp_schedule is None else rule_of("pp_schedule", pp_schedule)
    placement = None
    if pipeline_parallel_schedule_csv is not None:
        placement = read_csv(pipeline_parallel_schedule_csv, pp_size=pp_mesh[pp_axis_name].size()).stage_to_rank
    return split_model(
        model,
        pp_mesh,
        pp_axis_name,
        rule,
        placement,
        device,
        module_names_per_stage,
        layers_per_stage,
        patch_inner_model,
        patch_causal_lm_model,
        round_to_pp_multiple,
        embed_cost,
        head_cost,
    )


def split_model(
    model: nn.Module,
    mesh: DeviceMesh,
    axis: str,
    rule: Rule | None,
    placement: list[int] | None,
    device: Device,
    module_names_per_stage: list[list[str]] | None,
    layers_per_stage: int | None,
    patch_inner: bool,
    patch_outer: bool,
    rounding: str | None,
    embed_cost: float = 0.0,
    head_cost: float = 0.0,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """This rank's stages and their modules. `placement` comes from a file; if it is None, `rule` defines it.

    Errors: ValueError as for `split_model_into_stages`, before the model is touched.
    """
    ranks, rank = mesh[axis].size(), mesh.get_local_rank(axis)
    # 1. Name the modules of each stage: the argument's names, or else layers divided evenly.
    parts = model_parts(model)
    if module_names_per_stage is not None:
        names = complete_names(model, parts, module_names_per_stage)
        count = len(names)
    else:
        count = len(placement) if placement else _n_stages(parts, layers_per_stage, ranks, rule, rounding)
        names = parts.names(count, embed_cost, head_cost)
    # 2. Find the rank of each stage, and check the split. From step 3 on no argument can cause an error.
    placement = _placement(placement, count, ranks, rule)
    for problem in split_problems(model, parts, names, patch_inner, patch_outer):
        raise Rejected(problem)
    tied_weights = tied_weights_across(model, names)
    # 3. Build a module for each stage of this rank, with its copies of tied weights and its forward.
    local_stages = [stage for stage, other in enumerate(placement) if other == rank]
    modules = [_part(model, names, stage, local_stages) for stage in local_stages]
    copy_tied_weights(dict(zip(local_stages, modules, strict=True)), tied_weights)
    for module in modules:
        _patch(module, parts, patch_inner, patch_outer)
    consume(model, f"this {type(model).__name__} was split into {count} stages, which have its modules; call those")
    # 4. Build torch's stages.
    group = mesh.get_group(axis)
    stages: list[Any] = [
        PipelineStage(module, stage, count, torch.device(device), group=group)
        for stage, module in zip(local_stages, modules, strict=True)
    ]
    for stage in stages:
        stage.tied_copies = tied_weights
    return stages, modules


def _n_stages(parts: ModelParts, per_stage: int | None, ranks: int, rule: Rule | None, rounding: Any) -> int:
    is_single = rule is not None and rule.is_single
    return calculate_virtual_stages(parts.count, per_stage, ranks, is_single, rounding)[0]


def _placement(placement: list[int] | None, count: int, ranks: int, rule: Rule | None) -> list[int]:
    """The rank of each stage, from the file or from the schedule. Errors: ValueError."""
    if placement:
        if len(placement) != count:
            raise Rejected(
                f"module_names_per_stage has {count} stages, pipeline_parallel_schedule_csv "
                f"{len(placement)}; pass equal numbers"
            )
        return placement
    if count % ranks:
        raise Rejected(f"module_names_per_stage has {count} stages, not a multiple of pp_size={ranks}")
    problem = stages_problem(rule, count // ranks)  # pyright: ignore[reportArgumentType]
    if problem:
        raise Rejected(f"{count} stages are {count // ranks} on each rank, but {problem}")
    return ranks_of_stages(ranks, count, rule.style)  # pyright: ignore[reportOptionalMemberAccess]


def _part(model: nn.Module, names: Sequence[Sequence[str]], stage: int, local_stages: Sequence[int]) -> nn.Module:
    """The module of a stage. A submodule that several local stages need moves to the first; the others copy it."""

    def move_or_copy(path: str, module: nn.Module) -> nn.Module:
        first = next(other for other in local_stages if path in names[other])
        # Copy, so that a change to one stage, such as sharding, does not change the other.
        return module if first == stage else copy.deepcopy(module)

    return shell(model, set(names[stage]), move_or_copy)


def _patch(module: nn.Module, parts: ModelParts, patch_inner: bool, patch_outer: bool) -> None:
    inner = module.get_submodule(parts.inner)
    if patch_inner:
        run_as_family(inner, parts.layers.rpartition(".")[2], parts.count, parts.skippable, parts.summands)
    if parts.inner and patch_outer:
        run_head(module, inner, parts.heads)
