"""What every rank does: build its part of the model, take its part of each batch, step, and keep what came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parity_tests.tracing.events import Event
from parity_tests.tracing.torch_side import Recording, recorded
from parity_tests.training import checkpoint, record
from parity_tests.training.corpus import Packed, global_batch
from parity_tests.training.initial import initial_weights
from parity_tests.training.precision import KEPT, policy
from parity_tests.training.ring_and_heads import ring_and_heads
from parity_tests.training.run import Run
from torch_impl.models import (
    HybridConfig,
    HybridLM,
    Placement,
    RankStream,
    Stream,
    gradient_norm,
    normalised,
    own_streams,
    rank_stream,
    tensor_parallel_plan,
    valid_count,
)
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize


def train(mesh: Any, case: Any) -> list[float]:
    """The whole run on one rank; rank 0 writes each step's record into the case's folder. Returns the losses."""
    run, folder = Run(**case.options["run"]), case.options["folder"]
    model = parallel_model(mesh, run)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=run.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=run.weight_decay
    )
    first = checkpoint.load(run, model, optimizer) if run.resume else 0
    losses = []
    for index in range(first, run.steps):
        loss, norm = gradients_of(mesh, run, model, index)
        gradients = whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        weights = whole(dict(model.named_parameters()))
        if dist.get_rank() == 0:
            record.write(folder, record.Step(index, loss, norm, gradients, weights))
        if run.checkpoint is not None and ((index + 1) % run.every == 0 or index + 1 == run.steps):
            checkpoint.save(run, model, optimizer, index + 1)
        losses.append(loss)
    return losses


def trace(mesh: Any, case: Any) -> tuple[Recording, dict[str, Any]]:
    """What every module of this rank saw in the first step, its calls numbered by stream, and whole gradients."""
    run = Run(**case.options["run"])
    model = parallel_model(mesh, run)
    with recorded(model) as found:
        gradients_of(mesh, run, model, 0)
    gradients = whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    first, ranks = dp_rank(mesh), run.dp * run.size("cp")

    def placed(arrays: dict[Event, Any], scale: float) -> dict[Event, Any]:
        return {event._replace(call=first + event.call * run.dp): x * scale for event, x in arrays.items()}

    # Gradients are averaged only where they reach parameters: on their way they are those of `ranks` times the loss.
    return Recording(placed(found.values, 1.0), placed(found.gradients, 1.0 / ranks)), gradients


def parallel_model(mesh: Any, run: Run) -> nn.Module:
    """The model with the run's first weights, cut over the mesh."""
    config, dtype = HybridConfig(**run.config), getattr(torch, KEPT[run.dtype])
    groups = {"ring_and_heads": ring_and_heads(mesh)} if run.attention == "usp" else {}
    placement = Placement(mesh["cp"], mesh["tp"], exchange=run.attention, mamba=run.mamba, **groups)
    model = HybridLM(config, placement, dtype=dtype)
    given = {name: torch.from_numpy(array) for name, array in initial_weights(run.config, run.seed).items()}
    if config.is_tied:
        given["lm_head.weight"] = given["embed_tokens.weight"]
    model.load_state_dict(given)
    plan = tensor_parallel_plan(config.layers)
    return fsdp2_strategy_parallelize(model, mesh.device_mesh, policy(run.dtype), plan)


def gradients_of(mesh: Any, run: Run, model: nn.Module, index: int) -> tuple[float, float]:
    """Forward and backward of one step, a microbatch for each stream of this rank; the loss and the gradient's norm."""
    own = rank_batch(mesh, run, global_batch(run, index))
    groups = [mesh[axis] for axis in ("dp_replicate", "dp_shard", "cp")]
    count = valid_count([each.targets for each in own], groups)
    ranks = run.dp * run.size("cp")
    total = torch.zeros((), dtype=torch.float64)
    for each in own:
        share = normalised(model(each.ids, each.layout, each.targets), count, averaged_over=ranks)
        share.backward()
        total += share.detach()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.item() / ranks, gradient_norm(model.parameters()).item()


def rank_batch(mesh: Any, run: Run, batch: list[Packed]) -> list[RankStream]:
    """This rank's tokens of its streams."""
    streams = [Stream(torch.from_numpy(x.ids), torch.from_numpy(x.padded), torch.from_numpy(x.real)) for x in batch]
    own = own_streams(streams, run.dp, dp_rank(mesh))
    return [rank_stream(each, mesh.size("cp"), mesh.rank("cp")) for each in own]


def dp_rank(mesh: Any) -> int:
    """This rank's place among those with streams of their own."""
    return mesh.rank("dp_replicate") * mesh.size("dp_shard") + mesh.rank("dp_shard")


def whole(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Every tensor whole, in float64; all ranks take part."""
    with _without_advice():
        full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
    return {name: x.detach().double().cpu().numpy().copy() for name, x in full.items()}


@contextmanager
def _without_advice() -> Iterator[None]:
    """DTensor advises to flatten axes that it gathers one after another; here the mesh is what is asked for."""
    said = logging.getLogger("torch.distributed.tensor._redistribute")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        yield
    finally:
        said.setLevel(level)
