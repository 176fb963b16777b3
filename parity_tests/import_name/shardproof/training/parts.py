"""The model of a run on one rank: its pipeline stages, sharded over the other axes, and their schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from shardproof.engines.speed_advice import without_advice
from shardproof.tracing.torch_side import Recording, recorded
from torch_impl.models import RankStream, StepLoss, staged_step
from torch_impl.optimizers import clip_grad_norm_, gradient_norm
from torch_impl.parallelizer import to_cpu
from torch_impl.pipelining.tied_weights import distinct_parameters


@dataclass(frozen=True)
class Parts:
    """The `stages` of this rank, their `schedule`, and the last stage's `loss`; `shapes` are the full model's."""

    schedule: Any
    stages: list[PipelineStage]
    loss: StepLoss
    pp: ProcessGroup
    shapes: Mapping[str, tuple[int, ...]]

    def step(self, streams: list[RankStream], groups: list[ProcessGroup]) -> Tensor:
        """Run forward and backward, and return this rank's share of the loss, in float64."""
        shares = staged_step(self.schedule, self.stages, self.loss, streams, groups)
        return sum((share.double() for share in shares), torch.zeros((), dtype=torch.float64))

    def norm(self) -> float:
        """The norm of the full gradient."""
        return gradient_norm(distinct_parameters(self.stages).values(), pp=self.pp).item()

    def clip(self, max_norm: float) -> None:
        """Scale the full gradient down to this norm if its norm is larger."""
        counted = distinct_parameters(self.stages).values()
        clip_grad_norm_(counted, max_norm, pp=self.pp, uncounted=self.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """The parameters for this rank's optimizer, with both copies of a parameter that two stages share."""
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def aliases(self) -> dict[str, nn.Parameter]:
        """This rank's parameters under all of their names in the model's state, which are the same on every mesh."""
        parts = [stage.submod for stage in self.stages]
        return {name: p for part in parts for name, p in part.named_parameters(remove_duplicate=False)}

    def weights(self) -> dict[str, Any]:
        """The full model's weights. A collective: call it on all ranks."""
        return self._full(dict(distinct_parameters(self.stages)))

    def gradients(self) -> dict[str, Any]:
        """The full model's gradients, without parameters that have none. A collective: call it on all ranks."""
        parameters = distinct_parameters(self.stages)
        return self._full({name: p.grad for name, p in parameters.items() if p.grad is not None})

    def _full(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The full tensors of all stages, in float64."""
        with without_advice():
            # `to_cpu` also gathers experts on torch 2.11, where `full_tensor` rejects their placements.
            full = {name: to_cpu(x.detach()) for name, x in tensors.items()}
        names = list(self.shapes)
        every = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        is_there = torch.zeros(len(names), dtype=torch.float64)
        for name, x in full.items():
            every[name] += x.double()
            is_there[names.index(name)] = 1.0
        flat = torch.cat([is_there, *(x.flatten() for x in every.values())]).to(self.stages[0].device)
        dist.all_reduce(flat, group=self.pp)  # one rank of pp has the tensor, the others have zeros
        there, *pieces = flat.cpu().split([len(names), *(x.numel() for x in every.values())])
        rows = zip(names, pieces, there.tolist(), strict=True)
        return {name: x.numpy().reshape(self.shapes[name]) for name, x, is_there in rows if is_there}


@contextmanager
def all_recorded(stages: Sequence[PipelineStage]) -> Iterator[Recording]:
    """`recorded` for all stages of this rank; the recording is complete when the context is left."""
    recording = Recording()
    with ExitStack() as opened:
        parts = [opened.enter_context(recorded(stage.submod)) for stage in stages]
        yield recording
    for part in parts:
        recording.values.update(part.values)
        recording.gradients.update(part.gradients)
