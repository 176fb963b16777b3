"""Train a small model on a mesh with a parallelizer, and give back loss, gradients and weights by name.

A rank's loss is data * sum(its token losses) / N, with N the tokens of the whole step, so that what FSDP averages is
the gradient of the mean over all tokens, whatever the mesh and however many microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parity_tests.harness.declare.case import CaseSpec
from parity_tests.harness.run.engines import run
from parity_tests.harness.run.ledger import Ledger
from parity_tests.parallelizer.families import IGNORED, Chosen, batch, made
from parity_tests.parallelizer.promise import broken, broken_on_ranks, deviation
from parity_tests.parallelizer.whole_model import ADAMW, summed_loss
from torch_impl.collectives.mesh import MeshView
from torch_impl.parallelizer import to_cpu
from torch_impl.parallelizer.mesh_axes import mesh_axes

ROWS, LENGTH = 12, 5  # rows are a multiple of every number of data ranks times microbatches here
STEPS = 3
Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


@dataclass(frozen=True)
class Training:
    """A model, how often its gradients are accumulated before a step, and how many steps it takes."""

    chosen: Chosen
    accumulation: int = 1
    steps: int = STEPS
    dtype: torch.dtype = torch.float64
    shape: tuple[int, int] = (ROWS, LENGTH)

    @property
    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [batch(self.chosen, *self.shape, seed) for seed in range(self.steps)]


@dataclass
class OnRank:
    """What one rank ends with: the loss of each step, its own part; the first step's gradients, the last's weights."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    is_counted: bool = True  # whether its losses are no copy of another tp rank's


def train_on_rank(view: MeshView, training: Training, parallelize: Parallelize) -> OnRank:
    """The steps on this rank."""
    mesh, found = view.device_mesh, OnRank()
    axes = mesh_axes(mesh)
    rank = axes.loss_mesh.get_local_rank()
    found.is_counted = axes.tp_mesh is None or axes.tp_mesh.get_local_rank() == 0
    model = parallelize(made(training.chosen, training.dtype), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)
    for number, (ids, targets) in enumerate(training.batches):
        optimizer.zero_grad()
        found.losses.append(accumulated(model, ids, targets, rank, axes.data_size, training.accumulation))
        if number == 0:
            found.gradients = whole(model, gradients=True)
        optimizer.step()
    found.weights = whole(model)
    return found


def accumulated(
    model: nn.Module, ids: np.ndarray, targets: np.ndarray, rank: int, ranks: int, accumulation: int
) -> float:
    """Backward of this rank's rows, a microbatch at a time, reduced after the last; its part of the mean loss."""
    tokens, total = int((targets != IGNORED).sum()), 0.0
    for micro in range(accumulation):
        own = slice(micro * ranks + rank, None, ranks * accumulation)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro == accumulation - 1)  # pyright: ignore[reportCallIssue]
        loss = summed_loss(model(input_ids=torch.from_numpy(ids[own])).logits, torch.from_numpy(targets[own])) / tokens
        (ranks * loss).backward()
        total += loss.item()
    return total


def whole(model: nn.Module, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """Every parameter, or its gradient, under every name it has; collective."""
    named = model.named_parameters(remove_duplicate=False)
    found = {name: to_cpu(p.grad if gradients else p) for name, p in named}
    return {name: tensor.detach().double().numpy().copy() for name, tensor in found.items()}


def on_mesh(
    mesh: Mapping[str, int], training: Training, parallelize: Parallelize, engine: str = "lockstep"
) -> tuple[Sequence[OnRank], Ledger]:
    """The training on every rank of a mesh."""

    def body(view: MeshView, case: CaseSpec) -> OnRank:
        return train_on_rank(view, training, parallelize)

    ranks = run(body, CaseSpec(scheme="training", mesh=mesh, dtype="float64"), engine)
    return ranks.results, ranks.ledger


def verdict(mesh: Mapping[str, int], training: Training, ranks: Sequence[OnRank], want: Any) -> list[str]:
    """What is not as the reference has it, a sentence each: losses, gradients, weights, replicas."""
    said = []
    for number, step in enumerate(want.steps):
        loss = sum(rank.losses[number] for rank in ranks if rank.is_counted)
        said += broken({"loss": loss}, {"loss": step.loss})
    said += [
        f"gradient: {each}" for each in broken_on_ranks([r.gradients for r in ranks], want.steps[0].gradients, mesh)
    ]
    said += [f"weight: {each}" for each in broken_on_ranks([r.weights for r in ranks], want.parameters, mesh)]
    first = ranks[0].weights
    said += [
        f"weight: {name} differs between rank 0 and rank {number}"
        for number, rank in enumerate(ranks)
        for name in first
        if not np.array_equal(first[name], rank.weights[name]) and deviation(first[name], rank.weights[name])
    ]
    return said
