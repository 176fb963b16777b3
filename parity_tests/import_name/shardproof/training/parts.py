"""The model of a run on one rank: the stages of a pipeline, sharded over the other axes, under their schedule."""

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
from torch.distributed.tensor import DTensor

from shardproof.engines.speed_advice import without_advice
from shardproof.tracing.torch_side import Recording, recorded
from torch_impl.models import RankStream, StepLoss, staged_step
from torch_impl.optimizers import clip_grad_norm_, gradient_norm
from torch_impl.pipelining.tied_weights import distinct_parameters


@dataclass(frozen=True)
class Parts:
    """`schedule` over the `stages` of this rank, with the `loss` of its last; `shapes` are the full model's."""

    schedule: Any
    stages: Sequence[PipelineStage]
    loss: StepLoss
    pp: ProcessGroup
    shapes: Mapping[str, tuple[int, ...]]

    def step(self, streams: Sequence[RankStream], groups: Sequence[ProcessGroup]) -> Tensor:
        """Forward and backward; this rank's share of the loss, in float64."""
        shares = staged_step(self.schedule, self.stages, self.loss, streams, groups)
        return sum((share.double() for share in shares), torch.zeros((), dtype=torch.float64))

    def norm(self) -> float:
        """Of the full gradient."""
        return gradient_norm(distinct_parameters(self.stages).values(), pp=self.pp).item()

    def clip(self, max_norm: float) -> None:
        """Scale the full gradient to this norm, if its own is larger."""
        counted = distinct_parameters(self.stages).values()
        clip_grad_norm_(counted, max_norm, pp=self.pp, uncounted=self.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer of this rank holds; both copies of what two stages share."""
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def aliases(self) -> dict[str, nn.Parameter]:
        """Every name under which the model's state knows a parameter of this rank, the same names on every mesh."""
        parts = [stage.submod for stage in self.stages]
        return {name: p for part in parts for name, p in part.named_parameters(remove_duplicate=False)}

    def weights(self) -> dict[str, Any]:
        """Of the full model; all ranks take part."""
        return self._full(dict(distinct_parameters(self.stages)))

    def gradients(self) -> dict[str, Any]:
        """Of the full model, none where backward did not come; all ranks take part."""
        parameters = distinct_parameters(self.stages)
        return self._full({name: p.grad for name, p in parameters.items() if p.grad is not None})

    def _full(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Every tensor whole, in float64, those of other stages too."""
        with without_advice():
            full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
        names = list(self.shapes)
        every = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        is_there = torch.zeros(len(names), dtype=torch.float64)
        for name, x in full.items():
            every[name] += x.detach().double().cpu()
            is_there[names.index(name)] = 1.0
        flat = torch.cat([is_there, *(x.flatten() for x in every.values())]).to(self.stages[0].device)
        dist.all_reduce(flat, group=self.pp)  # a name is on one rank of pp, and 0 on the others
        there, *pieces = flat.cpu().split([len(names), *(x.numel() for x in every.values())])
        rows = zip(names, pieces, there.tolist(), strict=True)
        return {name: x.numpy().reshape(self.shapes[name]) for name, x, is_there in rows if is_there}


@contextmanager
def all_recorded(stages: Sequence[PipelineStage]) -> Iterator[Recording]:
    """As `recorded`, of all stages of this rank; whole once the context is left."""
    recording = Recording()
    with ExitStack() as opened:
        parts = [opened.enter_context(recorded(stage.submod)) for stage in stages]
        yield recording
    for part in parts:
        recording.values.update(part.values)
        recording.gradients.update(part.gradients)
