"""Train a small model, in one process or on a mesh with a parallelizer; give back loss, gradients and weights by name.

A rank's loss is data * sum(its token losses) / N, with N the tokens of the full step, so that FSDP's average is
the gradient of the mean over all tokens, whatever the mesh and however many microbatches. Ranks in other processes
import this module, which therefore loads no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from parity_tests.parallelizer.families import IGNORED, Chosen, batch, model_of
from shardproof.declare.case import CaseSpec
from shardproof.engines.engines import run
from shardproof.engines.ledger import Ledger
from torch_impl.collectives.mesh import MeshView
from torch_impl.parallelizer import get_hf_tp_shard_plan, to_cpu
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize
from torch_impl.parallelizer.mesh_axes import mesh_axes

# |a - b| / |b| of each parameter's gradient, and of each parameter after three steps of AdamW, in float64.
PROMISED = 1e-10


def deviation(got: Any, want: Any) -> float:
    """|got - want| / |want|; a gradient that is 0 by the mathematics has to be 0."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        return np.inf
    size, wrong = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(wrong / size) if size else float(np.inf if wrong else 0.0)


def broken(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """One sentence for each name that deviates by more than is promised, the worst first."""
    if set(got) != set(want):
        return [f"{sorted(set(want) - set(got))} are missing, {sorted(set(got) - set(want))} are unknown"]
    deviations = {name: deviation(got[name], want[name]) for name in want}
    worst = sorted(
        (name for name in deviations if not deviations[name] <= PROMISED), key=deviations.__getitem__, reverse=True
    )
    return [f"{name} is {deviations[name]:.1e} off{_factor(got[name], want[name])}" for name in worst]


def broken_on_ranks(ranks: Sequence[Mapping[str, Any]], want: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
    """The same for the full tensors of each rank of a mesh; a missing sum over an axis is named."""
    sentences = [f"rank {rank}: {message}" for rank, got in enumerate(ranks) for message in broken(got, want)[:1]]
    if not sentences or any(set(got) != set(want) for got in ranks):
        return sentences
    grid = np.arange(len(ranks)).reshape(tuple(mesh.values()))
    for name in want:
        if deviation(ranks[0][name], want[name]) <= PROMISED:
            continue
        for axis, (label, size) in enumerate(mesh.items()):
            summed = sum(np.asarray(ranks[rank][name]) for rank in np.moveaxis(grid, axis, 0).reshape(size, -1)[:, 0])
            if size > 1 and deviation(summed, want[name]) <= PROMISED:
                sentences.append(f"{name} misses a sum over {label}")
    return sentences


def _factor(got: Any, want: Any) -> str:
    """` by the factor 2`, where one number explains all of it."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.vdot(want, want):
        return f": {got.shape} for {want.shape}" if got.shape != want.shape else ""
    factor = float(np.vdot(got, want) / np.vdot(want, want))
    return f" by the factor {factor:.6g}" if deviation(got, factor * want) <= PROMISED else ""


@dataclass(frozen=True)
class Step:
    """The result of a step: the loss, on a rank its own addend; the norm of all gradients; arrays by name.

    `clipped` are the gradients after clipping. A step without an optimizer leaves no weights.
    """

    loss: float
    norm: float
    gradients: dict[str, np.ndarray]
    clipped: dict[str, np.ndarray]
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def broken_steps(want: Step, mesh: Mapping[str, int], ranks: Sequence[Step]) -> list[str]:
    """Differences from one process, a sentence each: losses, norms, gradients, clipped gradients, weights."""
    sentences = broken({"loss": sum(rank.loss for rank in ranks) / mesh.get("tp", 1)}, {"loss": want.loss})
    sentences += [each for rank in ranks for each in broken({"norm": rank.norm}, {"norm": want.norm})]
    for part in ("gradients", "clipped", "weights"):
        problems = broken_on_ranks([getattr(rank, part) for rank in ranks], getattr(want, part), mesh)
        sentences += [f"{part}: {each}" for each in problems]
    return sentences


ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the token losses, in the logits' dtype or float32, whichever is wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def trained(chosen: Chosen, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Loss, logits and gradients of the first batch, weights after a step of AdamW for each; arrays by name."""
    model, outcome = model_of(chosen), {}
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for ids, targets in batches:
        optimizer.zero_grad()
        logits = model(input_ids=torch.from_numpy(ids)).logits
        loss = summed_loss(logits, torch.from_numpy(targets)) / int((targets != IGNORED).sum())
        loss.backward()
        if not outcome:
            outcome = {"loss": loss.item(), "logits": logits.detach().numpy()}
            outcome["gradients"] = {name: p.grad.numpy().copy() for name, p in named.items()}
        optimizer.step()
    return {**outcome, "weights": {name: p.detach().numpy() for name, p in named.items()}}


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
    """One rank's results: the loss of each step, its own part; the first step's gradients, the last's weights."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    is_counted: bool = True  # whether its losses are no copy of another tp rank's


def train_on_rank(view: MeshView, training: Training, parallelize: Parallelize) -> OnRank:
    """The steps on this rank."""
    mesh, result = view.device_mesh, OnRank()
    axes = mesh_axes(mesh)
    rank = axes.loss_mesh.get_local_rank()
    result.is_counted = axes.tp_mesh is None or axes.tp_mesh.get_local_rank() == 0
    model = parallelize(model_of(training.chosen, training.dtype), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)
    for number, (ids, targets) in enumerate(training.batches):
        optimizer.zero_grad()
        result.losses.append(accumulated(model, ids, targets, rank, axes.data_size, training.accumulation))
        if number == 0:
            result.gradients = full_arrays(model, gradients=True)
        optimizer.step()
    result.weights = full_arrays(model)
    return result


def accumulated(
    model: nn.Module, ids: np.ndarray, targets: np.ndarray, rank: int, ranks: int, accumulation: int
) -> float:
    """Backward of this rank's rows, a microbatch at a time, reduced after the last; its part of the mean loss."""
    tokens, total = int((targets != IGNORED).sum()), 0.0
    for micro in range(accumulation):
        rows = slice(micro * ranks + rank, None, ranks * accumulation)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro == accumulation - 1)  # pyright: ignore[reportCallIssue]
        loss = (
            summed_loss(model(input_ids=torch.from_numpy(ids[rows])).logits, torch.from_numpy(targets[rows])) / tokens
        )
        (ranks * loss).backward()
        total += loss.item()
    return total


def full_arrays(model: nn.Module, *, gradients: bool = False) -> dict[str, np.ndarray]:
    """Every parameter, or its gradient, under every name it has; collective."""
    named = model.named_parameters(remove_duplicate=False)
    tensors = {name: to_cpu(p.grad if gradients else p) for name, p in named}
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}


def on_mesh(
    mesh: Mapping[str, int], training: Training, parallelize: Parallelize, engine: str = "lockstep"
) -> tuple[Sequence[OnRank], Ledger]:
    """The training on every rank of a mesh."""

    def body(view: MeshView, case: CaseSpec) -> OnRank:
        return train_on_rank(view, training, parallelize)

    ranks = run(body, CaseSpec(scheme="training", mesh=mesh, dtype="float64"), engine)
    return ranks.results, ranks.ledger


def verdict(mesh: Mapping[str, int], training: Training, ranks: Sequence[OnRank], want: Any) -> list[str]:
    """Differences from the reference, a sentence each: losses, gradients, weights, replicas."""
    sentences = []
    for number, step in enumerate(want.steps):
        loss = sum(rank.losses[number] for rank in ranks if rank.is_counted)
        sentences += broken({"loss": loss}, {"loss": step.loss})
    sentences += [
        f"gradient: {each}" for each in broken_on_ranks([r.gradients for r in ranks], want.steps[0].gradients, mesh)
    ]
    sentences += [f"weight: {each}" for each in broken_on_ranks([r.weights for r in ranks], want.parameters, mesh)]
    first = ranks[0].weights
    sentences += [
        f"weight: {name} differs between rank 0 and rank {number}"
        for number, rank in enumerate(ranks)
        for name in first
        if not np.array_equal(first[name], rank.weights[name]) and deviation(first[name], rank.weights[name])
    ]
    return sentences


TENSOR_PARALLEL = {"tp", "tensor_parallel"}


def parallelized(
    policy: MixedPrecisionPolicy | None = None, **switches: Any
) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    """A function of a model and a mesh."""

    def parallelize(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_cut = TENSOR_PARALLEL & set(device_mesh.mesh_dim_names or ())
        plan: Any = get_hf_tp_shard_plan(model) if is_cut else None
        return fsdp2_strategy_parallelize(model, device_mesh, policy, plan, **switches)

    return parallelize
