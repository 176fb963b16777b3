"""Parameters that two stages share: a copy on each, with one gradient, the sum of what both contributed.

What is summed is what one step of a schedule added, so that steps accumulate right. Both copies hold the same bits
after it, and an optimiser that treats them alike keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from torch_impl.pipelining._torch_compat import of_torch


class Tie(NamedTuple):
    """Two names of one parameter, on two stages, the lower first."""

    first: tuple[int, str]
    second: tuple[int, str]


def ties_across(model: nn.Module, stages: Sequence[Sequence[str]]) -> tuple[Tie, ...]:
    """The parameters that stages share. Errors: ValueError for one that three stages share."""
    owners: dict[int, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next(k for k, names in enumerate(stages) if any(name.startswith(f"{each}.") for each in names))
        owners.setdefault(id(parameter), {}).setdefault(stage, name)
    shared = [sorted(of.items()) for of in owners.values() if len(of) > 1]
    for of in shared:
        if len(of) > 2:
            raise ValueError(
                f"pipelining.split_model_into_stages: stages {[stage for stage, _ in of]} share {of[0][1]!r}; two can, "
                "so keep its modules on two stages"
            )
    return tuple(Tie(*of) for of in shared)


def part_ties(modules: Mapping[int, nn.Module], ties: Sequence[Tie]) -> None:
    """Where one rank has both stages, give the second a copy of its own; in place."""
    for tie in ties:
        (first, name), (second, other) = tie
        if first in modules and second in modules:
            parameter = modules[first].get_parameter(name)
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            owner, _, last = other.rpartition(".")
            setattr(modules[second].get_submodule(owner), last, copied)


def named_once(stages: Sequence[PipelineStage]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stages by name, less the later copy of each tie: on all ranks of the pipeline
    together every parameter of the model stands once."""
    later = {tie.second for tie in getattr(stages[0], "tied_copies", ())}
    return {
        name: parameter
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
        if (stage.stage_index, name) not in later
    }


def sum_ties_after_each_step(schedule: Any, stages: Sequence[PipelineStage]) -> None:
    """Wrap the schedule's `step`; in place. Every rank of the pipeline must step alike.

    Cost of a step: for each tie one send and one receive of its gradient on the two ranks that have it.
    """
    ties: Sequence[Tie] = getattr(stages[0], "tied_copies", ())
    held = {stage.stage_index: stage for stage in stages}
    mine = [tie for tie in ties if {tie.first[0], tie.second[0]} & set(held)]
    if not mine:
        return
    step: Callable[..., Any] = schedule.step

    def tied_step(*args: Any, **kwargs: Any) -> Any:
        if not of_torch(schedule, "_has_backward"):
            return step(*args, **kwargs)
        parameters = [held[stage].submod.get_parameter(name) for tie in mine for stage, name in tie if stage in held]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        returned = step(*args, **kwargs)
        for tie in mine:
            _sum(tie, held)
        for parameter, sum_so_far in zip(parameters, before, strict=True):
            if sum_so_far is not None:
                parameter.grad = sum_so_far if parameter.grad is None else sum_so_far + parameter.grad
        return returned

    schedule.step = tied_step


def _sum(tie: Tie, held: Mapping[int, PipelineStage]) -> None:
    """The gradient of both copies becomes first + second, in this order on both ranks."""
    own = {stage: held[stage].submod.get_parameter(name) for stage, name in tie if stage in held}
    if not any(parameter.requires_grad for parameter in own.values()):
        return
    gradients = {stage: _gradient(parameter) for stage, parameter in own.items()}
    (first, _), (second, _) = tie
    if len(own) == 2:
        total = gradients[first] + gradients[second]
    else:
        ((stage, gradient),) = gradients.items()
        received = _exchanged(gradient, held[stage], second if stage == first else first)
        total = gradient + received if stage == first else received + gradient
    for gradient in gradients.values():
        gradient.copy_(total)


def _exchanged(gradient: Tensor, stage: PipelineStage, other: int) -> Tensor:
    """What the rank of another stage has in place of this; it is given this."""
    received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    group, peer = stage.group, stage.stage_index_to_group_rank[other]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
    )
    for work in works:
        work.wait()
    return received


def _gradient(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of the gradient, cut as the parameter is; zeros where backward did not come."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # of embeddings it may be whole
        return parameter.grad.to_local()
    return parameter.grad
