"""The program of every rank: build its part of the model, take its part of each batch, step, and write records."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.tracing.events import LOSS, NORM, Event
from shardproof.tracing.torch_side import Recording
from shardproof.training import checkpoint, record
from shardproof.training.corpus import Packed, global_batch
from shardproof.training.initial import initial_weights, shapes
from shardproof.training.parts import Parts, all_recorded
from shardproof.training.precision import STORED_DTYPE, policy
from shardproof.training.rank_optimizers import rank_optimizers
from shardproof.training.ring_and_heads import ring_and_heads
from shardproof.training.run import Run
from torch_impl.models import (
    HybridConfig,
    HybridLM,
    Placement,
    RankStream,
    StepLoss,
    Stream,
    rank_stream,
    streams_of_rank,
    tensor_parallel_plan,
)
from torch_impl.parallelizer.fsdp2 import fsdp2_strategy_parallelize
from torch_impl.pipelining.functional import pipeline_model

TOKEN_AXES = ("dp_replicate", "dp_shard", "ep", "cp")  # ranks along these axes have different tokens


def train(mesh: Any, case: Any) -> list[float]:
    """Run all steps on one rank, and return the losses. Rank 0 writes each step's record into the case's folder."""
    run, folder = Run(**case.options["run"]), case.options["folder"]
    first = checkpoint.newest(run) if run.resume else 0  # before any collective: a damaged file stops every rank
    model = parallel_model(mesh, run)
    optimizer = rank_optimizers(run, model)
    if run.resume:
        checkpoint.load(run, first, model.aliases(), optimizer)
    losses = []
    replaced = checkpoint.finished(run) if run.overwrite else []  # removed after this run's first checkpoint
    for index in range(first, run.steps):
        loss, norm = gradients_of(mesh, run, model, index)
        gradients = model.gradients()
        if run.clip is not None:
            model.clip(run.clip)
        optimizer.step()
        optimizer.zero_grad()
        weights = model.weights()
        if dist.get_rank() == 0:
            record.write(folder, record.Step(index, loss, norm, gradients, weights))
        if run.checkpoint is not None and ((index + 1) % run.every == 0 or index + 1 == run.steps):
            checkpoint.save(run, model.aliases(), optimizer, index + 1)
            if dist.get_rank() == 0:
                checkpoint.remove(run, [step for step in replaced if step != index + 1])
            replaced = []
        losses.append(loss)
    return losses


def trace(mesh: Any, case: Any) -> tuple[Recording, dict[str, Any], dict[str, float]]:
    """Trace the first step; returns the tensors of this rank's modules by stream, all gradients, and loss and norm."""
    run = Run(**case.options["run"])
    model = parallel_model(mesh, run)
    with all_recorded(model.stages) as recording:
        loss, norm = gradients_of(mesh, run, model, 0)
    gradients = model.gradients()
    first, ranks = dp_rank(mesh), run.dp * run.size("cp")

    def global_events(arrays: dict[Event, Any], scale: float) -> dict[Event, Any]:
        return {event._replace(call=first + event.call * run.dp): x * scale for event, x in arrays.items()}

    # Gradients are averaged at the parameters only: inside the model they are gradients of `ranks` times the loss.
    return (
        Recording(global_events(recording.values, 1.0), global_events(recording.gradients, 1.0 / ranks)),
        gradients,
        {LOSS: loss, NORM: norm},
    )


def parallel_model(mesh: Any, run: Run) -> Parts:
    """The model with the run's initial weights, split into stages; each stage is sharded over the other axes."""
    config, dtype = HybridConfig(**run.config), getattr(torch, STORED_DTYPE[run.dtype])
    rings = ring_and_heads(mesh) if run.attention == "usp" else None
    placement = Placement(mesh["cp"], mesh["tp"], exchange=run.attention, mamba=run.mamba, ring_and_heads=rings)
    model = HybridLM(config, placement, dtype=dtype)
    weights = {name: torch.from_numpy(array) for name, array in initial_weights(run.config, run.seed).items()}
    if config.is_tied:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights)
    loss = StepLoss(mesh["tp"], config.vocab_size, averaged_over=run.dp * run.size("cp"))
    schedule, _, _, _, stages = pipeline_model(
        model,
        mesh.device_mesh,
        None,
        pp_axis_name="pp",
        dp_axis_names=("dp_replicate", "dp_shard"),
        cp_axis_name="cp",
        tp_axis_name="tp",
        ep_axis_name="ep",
        layers_per_stage=None,
        pipeline_parallel_schedule_csv=None,
        pipeline_parallel_schedule=run.rule.name,
        microbatch_size=1,
        local_batch_size=run.streams // run.dp,
        device=torch.device(mesh.device_mesh.device_type),
        loss_fn=loss,
        parallelize_fn=partial(_parallelize_stage, run),
        patch_inner_model=False,
        patch_causal_lm_model=False,
        patch_stage_backward_maybe_with_nosync=True,
        seq_len=run.length // run.size("cp"),
    )
    return Parts(schedule, stages, loss, mesh["pp"], shapes(run.config))


def _parallelize_stage(run: Run, model: nn.Module, world_mesh: Any, moe_mesh: Any, **axes: Any) -> None:
    """Shard one stage over tp and FSDP. Its parameters stay gathered from the first micro-batch to the last."""
    plan = tensor_parallel_plan(list(HybridConfig(**run.config).layers))
    fsdp2_strategy_parallelize(model, world_mesh, policy(run.dtype), plan, reshard_after_forward=False)


def gradients_of(mesh: Any, run: Run, model: Parts, index: int) -> tuple[float, float]:
    """Run forward and backward of one step, with a microbatch for each stream. Returns the loss and gradient norm."""
    total = model.step(rank_batch(mesh, run, global_batch(run, index)), [mesh[axis] for axis in TOKEN_AXES])
    for axis in ("pp", *TOKEN_AXES):
        dist.all_reduce(total, group=mesh[axis])
    return total.item() / model.loss.averaged_over, model.norm()


def rank_batch(mesh: Any, run: Run, batch: list[Packed]) -> list[RankStream]:
    """This rank's shard of its streams."""
    streams = [Stream(torch.from_numpy(x.ids), torch.from_numpy(x.padded), torch.from_numpy(x.real)) for x in batch]
    local_streams = streams_of_rank(streams, run.dp, dp_rank(mesh))
    return [rank_stream(each, mesh.size("cp"), mesh.rank("cp")) for each in local_streams]


def dp_rank(mesh: Any) -> int:
    """This rank's index among the ranks with different streams."""
    data = mesh.rank("dp_replicate") * mesh.size("dp_shard") + mesh.rank("dp_shard")
    return data * mesh.size("ep") + mesh.rank("ep")
