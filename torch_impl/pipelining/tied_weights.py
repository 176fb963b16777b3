"""Weights that two stages share. Each stage has a copy, and both copies get the sum of both gradients.

Only the gradients of the current step are summed, so that gradients accumulate correctly over several steps of a
schedule. Both copies then have the same bits, and an optimizer with equal settings for both keeps them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from torch_impl.contract import Rejected
from torch_impl.pipelining._torch_compat import of_torch


class TiedWeight(NamedTuple):
    """The (stage, name) of both copies of one parameter, the lower stage first."""

    first: tuple[int, str]
    second: tuple[int, str]


def tied_weights_across(model: nn.Module, stages: Sequence[Sequence[str]]) -> tuple[TiedWeight, ...]:
    """The parameters that two stages share. Errors: ValueError for a parameter that three or more stages share."""
    names_by_stage: dict[int, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next(k for k, names in enumerate(stages) if any(name.startswith(f"{each}.") for each in names))
        names_by_stage.setdefault(id(parameter), {}).setdefault(stage, name)
    shared = [sorted(names.items()) for names in names_by_stage.values() if len(names) > 1]
    for copies in shared:
        if len(copies) > 2:
            raise Rejected(
                f"stages {[stage for stage, _ in copies]} share {copies[0][1]!r}; "
                "two can, so put its modules on two stages"
            )
    return tuple(TiedWeight(*copies) for copies in shared)


def copy_tied_weights(modules: Mapping[int, nn.Module], tied_weights: Sequence[TiedWeight]) -> None:
    """Give the second stage a copy of each tied weight whose two stages are on this rank; in place."""
    for (first, name), (second, other) in tied_weights:
        if first in modules and second in modules:
            parameter = modules[first].get_parameter(name)
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            owner, _, last = other.rpartition(".")
            setattr(modules[second].get_submodule(owner), last, copied)


def distinct_parameters(stages: Sequence[PipelineStage]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stages by name, without second copies of tied weights: every parameter of the model
    occurs once over all pipeline ranks."""
    second_copies = {weight.second for weight in getattr(stages[0], "tied_copies", ())}
    return {
        name: parameter
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
        if (stage.stage_index, name) not in second_copies
    }


def sum_tied_gradients_after_each_step(schedule: Any, stages: Sequence[PipelineStage]) -> None:
    """Wrap the schedule's `step` in place, so that it sums tied gradients. All pipeline ranks must step equally often.

    Cost of a step: for each tied weight one send and one receive of one byte on each of its two ranks, and, unless it
    is frozen, of its gradient.
    Errors of a step: ValueError on both ranks, after they have told each other, for a tied weight of which one copy is
    frozen.
    """
    tied_weights: Sequence[TiedWeight] = getattr(stages[0], "tied_copies", ())
    local_stages = {stage.stage_index: stage for stage in stages}
    local_weights = [weight for weight in tied_weights if any(stage in local_stages for stage, _ in weight)]
    if not local_weights:
        return
    step: Callable[..., Any] = schedule.step

    def step_with_tied_weights(*args: Any, **kwargs: Any) -> Any:
        if not of_torch(schedule, "_has_backward"):
            return step(*args, **kwargs)
        copies = [copy for weight in local_weights for copy in weight if copy[0] in local_stages]
        parameters = [local_stages[stage].submod.get_parameter(name) for stage, name in copies]
        # 1. Set the gradients of earlier steps aside: they are summed already.
        accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        # 2. Run the step, and sum its gradients only.
        returned = step(*args, **kwargs)
        for weight in local_weights:
            _sum(weight, local_stages)
        # 3. Add the earlier gradients back.
        for parameter, earlier in zip(parameters, accumulated, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
        return returned

    schedule.step = step_with_tied_weights


def _sum(weight: TiedWeight, local_stages: Mapping[int, PipelineStage]) -> None:
    """Set the gradient of both copies to first + second, in this order on both ranks."""
    parameters = {
        stage: local_stages[stage].submod.get_parameter(name) for stage, name in weight if stage in local_stages
    }
    if not _is_trained(weight, parameters, local_stages):
        return
    gradients = {stage: _gradient(parameter) for stage, parameter in parameters.items()}
    (first, _), (second, _) = weight
    if len(gradients) == 2:
        total = gradients[first] + gradients[second]
    else:
        ((stage, gradient),) = gradients.items()
        received = _exchange(gradient, local_stages[stage], second if stage == first else first)
        total = gradient + received if stage == first else received + gradient
    for gradient in gradients.values():
        gradient.copy_(total)


def _is_trained(
    weight: TiedWeight, parameters: Mapping[int, nn.Parameter], local_stages: Mapping[int, PipelineStage]
) -> bool:
    """Whether both copies are trained, False if both are frozen. Errors: ValueError on both ranks if one is."""
    trained = {stage: parameter.requires_grad for stage, parameter in parameters.items()}
    if len(trained) == 1:
        # Ask the other rank: a rank that sends a gradient to one that expects none would wait for ever.
        ((stage, parameter),) = parameters.items()
        other = next(each for each, _ in weight if each != stage)
        flag = torch.tensor([trained[stage]], dtype=torch.uint8, device=parameter.device)
        trained[other] = bool(_exchange(flag, local_stages[stage], other))
    if len(set(trained.values())) > 1:
        places = [f"{name!r} on stage {stage} is {'trained' if trained[stage] else 'frozen'}" for stage, name in weight]
        raise ValueError(
            f"pipelining.step: the copies of a tied weight differ: {', '.join(places)}; freeze both or none"
        )
    return all(trained.values())


def _exchange(gradient: Tensor, stage: PipelineStage, other: int) -> Tensor:
    """Swap gradients with the rank of the other stage; returns the gradient of the other copy."""
    received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    group, peer = stage.group, stage.stage_index_to_group_rank[other]
    # Send and receive in one batch: if both ranks sent first, they could wait for each other.
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
    """This rank's shard of the gradient, with the parameter's placements; zeros if the backward did not reach it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
        # An embedding's gradient may be replicated although its weight is sharded.
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return parameter.grad.to_local()
    return parameter.grad
