"""Cut a model into stages: which modules each has, which stages this rank has, and a module for each of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from torch_impl.pipelining.arguments import Number
from torch_impl.pipelining.csv_schedule import read_csv
from torch_impl.pipelining.model_parts import NAME, Anatomy, anatomy_of, check_names, check_parameters, check_runs
from torch_impl.pipelining.named_schedules import Rule, rule_of, stages_fault
from torch_impl.pipelining.partition import calculate_virtual_stages, stage_to_rank
from torch_impl.pipelining.stage_module import consume, run_as_family, run_head, shell
from torch_impl.pipelining.tied_weights import part_ties, ties_across


def split_model_into_stages(
    model: nn.Module,
    pp_mesh: DeviceMesh,
    pp_axis_name: str,
    pp_schedule: str | None,
    device: torch.device,
    module_names_per_stage: list[list[str]] | None = None,
    layers_per_stage: int | None = None,
    patch_inner_model: bool = True,
    patch_causal_lm_model: bool = True,
    round_to_pp_multiple: str | None = None,
    *,
    pipeline_parallel_schedule_csv: str | None = None,
    embed_cost: Number = 0.0,
    head_cost: Number = 0.0,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """The stages of this rank and their modules, ascending. The model is used up: its modules move to the stages.

    Parameters keep their names. A module that no stage of the rank keeps becomes None, or is missing in a dict where
    layers were a list, and is freed with the model. The file of a schedule, if given, says which rank has which stage;
    else the schedule's own placement does. A stage takes ids if it has the embedding, else hidden states; it returns
    logits if it has the head, else hidden states.

    A parameter that two stages share becomes two, in `stage.tied_copies`; schedules of `build_pipeline_schedule` sum
    their gradients, so that they stay equal. A norm of all gradients counts them once.

    Cost:   none between ranks; no parameter is copied, but one that two stages of the rank share.
    Errors: TypeError for what is no module, mesh or name; ValueError for an axis that the mesh has not, stages that
            the schedule or the ranks cannot have, names that the model has not or that do not cover its layers in
            order, parameters that no stage or two stages would have.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"pipelining.{NAME}: model is a {type(model).__name__}; pass an nn.Module")
    if not isinstance(device, (torch.device, str)):
        raise TypeError(f"pipelining.{NAME}: device is a {type(device).__name__}; pass a torch.device")
    place = torch.device(device)
    ranks, rank = _checked_axis(pp_mesh, pp_axis_name)
    if pp_schedule is None and pipeline_parallel_schedule_csv is None:
        raise ValueError(f"pipelining.{NAME}: pp_schedule=None and pipeline_parallel_schedule_csv=None; pass one")
    rule = None if pp_schedule is None else rule_of(NAME, "pp_schedule", pp_schedule)
    parts = anatomy_of(model)
    placed = None
    if pipeline_parallel_schedule_csv is not None:
        placed = read_csv(pipeline_parallel_schedule_csv, pp_size=ranks).stage_to_rank
    if module_names_per_stage is not None:
        names = check_names(model, parts, module_names_per_stage)
        count = len(names)
    else:
        count = len(placed) if placed else _stages(parts, layers_per_stage, ranks, rule, round_to_pp_multiple)
        names = parts.names(count, embed_cost, head_cost)
    placed = _placed(placed, count, ranks, rule)
    check_parameters(model, names)
    ties = ties_across(model, names)
    check_runs(model, parts, names, patch_inner_model, patch_causal_lm_model)
    own = [stage for stage, other in enumerate(placed) if other == rank]
    modules = [_part(model, names, stage, own) for stage in own]
    part_ties(dict(zip(own, modules, strict=True)), ties)
    for module in modules:
        _patch(module, parts, patch_inner_model, patch_causal_lm_model)
    consume(model, f"this {type(model).__name__} was split into {count} stages, which have its modules; call those")
    group = pp_mesh.get_group(pp_axis_name)
    stages: list[Any] = [
        PipelineStage(module, stage, count, place, group=group) for stage, module in zip(own, modules, strict=True)
    ]
    for stage in stages:
        stage.tied_copies = ties
    return stages, modules


def _checked_axis(mesh: Any, axis: str) -> tuple[int, int]:
    """Size of the axis and rank on it."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"pipelining.{NAME}: pp_mesh is a {type(mesh).__name__}; pass a DeviceMesh")
    if axis not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"pipelining.{NAME}: pp_axis_name={axis!r} is no axis of pp_mesh {mesh.mesh_dim_names}")
    return mesh[axis].size(), mesh.get_local_rank(axis)


def _stages(parts: Anatomy, per_stage: int | None, ranks: int, rule: Rule | None, rounding: str | None) -> int:
    is_single = rule is not None and rule.is_single
    return calculate_virtual_stages(parts.count, per_stage, ranks, is_single, rounding)[0]


def _placed(read: list[int] | None, count: int, ranks: int, rule: Rule | None) -> list[int]:
    """The rank of each stage, by the file or by the schedule."""
    if read:
        if len(read) != count:
            raise ValueError(
                f"pipelining.{NAME}: module_names_per_stage has {count} stages, "
                f"pipeline_parallel_schedule_csv {len(read)}; pass as many"
            )
        return read
    if count % ranks:
        raise ValueError(
            f"pipelining.{NAME}: module_names_per_stage has {count} stages, not a multiple of pp_size={ranks}"
        )
    fault = stages_fault(rule, count // ranks)  # pyright: ignore[reportArgumentType]
    if fault:
        raise ValueError(f"pipelining.{NAME}: {count} stages are {count // ranks} on each rank, but {fault}")
    return stage_to_rank(ranks, count, rule.style)  # pyright: ignore[reportOptionalMemberAccess]


def _part(model: nn.Module, names: Sequence[Sequence[str]], stage: int, own: Sequence[int]) -> nn.Module:
    """The module of a stage. What several stages of the rank need is the first one's, and copied for the others."""

    def taken(path: str, module: nn.Module) -> nn.Module:
        first = next(other for other in own if path in names[other])
        return module if first == stage else copy.deepcopy(module)

    return shell(model, set(names[stage]), taken)


def _patch(module: nn.Module, parts: Anatomy, patch_inner: bool, patch_outer: bool) -> None:
    inner = module.get_submodule(parts.inner)
    if patch_inner:
        run_as_family(inner, parts.layers.rpartition(".")[2], parts.count, parts.handed_through)
    if parts.inner and patch_outer:
        run_head(module, inner, parts.heads)
