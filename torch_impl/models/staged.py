"""An optimiser step of a model in pipeline stages, with one stream of documents per micro-batch.

Every rank of a pipeline has all micro-batches, so the schedule can pass each stage the documents of its current
micro-batch. Stages exchange only hidden states and their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from torch_impl.contract import Groups, Instance, ListOf, Rejected, contract
from torch_impl.models.batch import RankStream, offsets_of
from torch_impl.models.layers import Moe
from torch_impl.models.loss import normalised, token_losses, valid_count


@dataclass
class StepLoss:
    """The `loss_fn` of a schedule: a micro-batch's term of this rank's share of the step's loss.

        logits  "1 s/cp v/tp"   targets  "1 s/cp"   ->   "dp=P cp=P tp=I"

    `count` is the number of valid tokens in the full step, over all micro-batches and ranks; `staged_step` sets it.
    Gradients must not be divided by the number of micro-batches: call `pipeline_model` with `scale_grads=False`.

    Cost:   as `token_losses`.
    Errors: ValueError before a count is set.
    """

    tp: ProcessGroup
    vocab_size: int
    averaged_over: int = 1
    count: Int[Tensor, ""] | None = None

    def __call__(self, logits: Float[Tensor, "1 s v"], targets: Int[Tensor, "1 s"]) -> Float[Tensor, ""]:
        """See the class."""
        if self.count is None:
            raise ValueError("models.StepLoss: count is None; set it to the valid_count of the step first")
        return normalised(token_losses(logits, targets, self.tp, self.vocab_size), self.count, self.averaged_over)


@runtime_checkable
class HasStep(Protocol):
    """A schedule of torch or of this project, as far as a step needs it."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""


Stages = Annotated[
    list[PipelineStage],
    ListOf(Instance(PipelineStage, "pass a PipelineStage", shows_value=False), "stages", "pass this rank's stages"),
]
OneLoss = Annotated[StepLoss, Instance(StepLoss, "pass the loss_fn of the schedule", shows_value=False)]
Schedule = Annotated[Any, Instance(HasStep, "pass the schedule of pipeline_model", shows_value=False)]
Streams = Annotated[
    list[RankStream],
    ListOf(Instance(RankStream, "pass a RankStream", shows_value=False), "streams", "pass one for each micro-batch"),
]


@contract
def staged_step(
    schedule: Schedule,
    stages: Stages,
    loss: OneLoss,
    streams: Streams,
    groups: Groups,
) -> list[Float[Tensor, ""]]:
    """Run forward and backward of one step, and return this rank's shares of the loss.

        shares  "dp=P cp=P tp=I pp=P": micro-batches' losses on the last stage's rank, router losses on the router's

    `schedule` and `stages` come from `pipeline_model`, with one micro-batch of one row per stream, and `loss` is its
    `loss_fn`; `groups` shard the batch, as for `valid_count`. Gradients are left in the parameters' `.grad`.

    Cost:   the schedule, its layers, and `valid_count`; 1 all_reduce of one int64 per group, and one host read.
    Errors: TypeError for an argument of another type; ValueError on every rank of the groups, after 1 all_reduce of
            one integer over each, if streams differ in length on any rank; ValueError if the number of streams differs
            from the schedule's micro-batches.
    """
    # 1. Count valid tokens first: each micro-batch divides its loss by the count of the full step.
    _check_lengths(streams, groups)
    targets = [stream.targets for stream in streams]
    loss.count = valid_count(targets, groups, loss.vocab_size)
    # 2. The first stage takes ids, the last stage targets, and every stage the documents. Documents are passed as a
    #    tensor, since a schedule splits only tensors over micro-batches.
    shares: list[Tensor] = []
    routers = [module for stage in stages for module in stage.submod.modules() if isinstance(module, Moe)]
    for router in routers:
        router.begin_step(len(streams) * math.prod(group.size() for group in groups), loss.averaged_over)
    schedule.step(
        *([torch.cat([stream.ids for stream in streams])] if any(stage.is_first for stage in stages) else []),
        **({"target": torch.cat(targets), "losses": shares} if any(stage.is_last for stage in stages) else {}),
        layout=offsets_of([stream.layout for stream in streams]),
        return_outputs=False,
    )
    # 3. Each router adds its losses on its own stage.
    return [share.detach() for share in shares] + [share for router in routers for share in router.end_step()]


def _check_lengths(streams: Sequence[RankStream], groups: Sequence[ProcessGroup]) -> None:
    """Reject streams of different lengths, on every rank: each rank sees only its own streams."""
    lengths = sorted({stream.ids.shape[1] for stream in streams})
    differ = torch.tensor(int(len(lengths) > 1), device=streams[0].ids.device)
    for group in groups:
        dist.all_reduce(differ, group=group)
    if differ:
        reason = f"have {lengths} tokens on this rank" if len(lengths) > 1 else "of another rank differ in length"
        raise Rejected(f"streams {reason}; pad them to one length")
