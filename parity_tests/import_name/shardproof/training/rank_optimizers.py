"""The optimizers of a rank's stages: AdamW for all parameters, or Muon for matrices and AdamW for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardproof.training.fused import has_halves
from shardproof.training.parts import Parts
from shardproof.training.run import Run
from torch_impl.optimizers import Muon, parameter_kinds


@dataclass(frozen=True)
class RankOptimizers:
    """Several optimizers used as one; each has parameters of its own."""

    parts: Sequence[torch.optim.Optimizer]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter."""
        return {parameter: state for each in self.parts for parameter, state in each.state.items()}

    def step(self) -> None:
        for each in self.parts:
            each.step()

    def zero_grad(self) -> None:
        for each in self.parts:
            each.zero_grad()


def rank_optimizers(run: Run, model: Parts) -> RankOptimizers:
    """The run's optimizers over all parameters of this rank. Weight decay applies to all of them, vectors too."""
    settings: dict[str, Any] = {"lr": run.learning_rate, "weight_decay": run.weight_decay}
    matrices: dict[str, Tensor] = {}
    if run.optimizer == "muon":
        matrices = {name: p for stage in model.stages for name, p in parameter_kinds(stage.submod).matrices.items()}
    stepped_by_muon = {id(p) for p in matrices.values()}
    other_parameters = [p for p in model.parameters() if id(p) not in stepped_by_muon]
    adamw = torch.optim.AdamW(other_parameters, betas=(0.9, 0.999), eps=1e-8, **settings)
    # Each expert in a fused stack has two matrices, gate above up.
    stacks = [{"params": [p], "rows": (p.shape[-2] // 2,) * 2} for name, p in matrices.items() if has_halves(name)]
    groups = [{"params": [p for name, p in matrices.items() if not has_halves(name)]}, *stacks]
    return RankOptimizers([adamw, Muon(groups, **settings)] if matrices else [adamw])
