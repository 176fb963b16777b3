"""The one place where gradients of stages are divided."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from torch_impl.pipelining.arguments import check_int

NAME = "scale_grads_by_divisor"


def scale_grads_by_divisor(stages: list[PipelineStage], divisor: int) -> None:
    """Divide the gradients of these stages in place, each once, also where stages share a parameter.

    Once for each step of the optimiser, after the last backward: with losses that are means, n micro-batches and k
    steps of the schedule the divisor is n * k. (A schedule's own `scale_grads=True` divides at each of its steps what
    has been accumulated, so that two equal steps come to 1 + 1 / n means, and not to 2.)

    Cost:   none between ranks; a DTensor's shard is divided where it lies.
    Errors: TypeError for what is no stage, or a divisor that is no int; ValueError for a divisor below 1.
    """
    if not isinstance(stages, (list, tuple)):
        raise TypeError(f"pipelining.{NAME}: stages is a {type(stages).__name__}; pass a list of PipelineStage")
    for index, stage in enumerate(stages):
        if not callable(getattr(stage, "scale_grads", None)) or not isinstance(
            getattr(stage, "submod", None), nn.Module
        ):
            raise TypeError(f"pipelining.{NAME}: stages[{index}] is a {type(stage).__name__}; pass a PipelineStage")
    check_int(NAME, "divisor", divisor)
    if divisor < 1:
        raise ValueError(
            f"pipelining.{NAME}: divisor={divisor} must be a positive int (microbatches x accumulation steps)"
        )
    parameters = {id(parameter): parameter for stage in stages for parameter in stage.submod.parameters()}
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
