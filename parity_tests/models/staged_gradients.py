"""A step of the hybrid model in stages as a function of its parameters: forward runs a schedule, backward returns the
gradients that it left. Its streams are the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from parity_tests.models.parameters import HEAD_DIM, config_of
from parity_tests.pipelining.stepped import Stepped
from shardproof.declare.declared import flat
from torch_impl.collectives import accumulator
from torch_impl.models import HybridConfig, HybridLM, Placement, RankStream, StepLoss, staged_step, tensor_parallel_plan
from torch_impl.pipelining.functional import pipeline_model
from torch_impl.pipelining.tied_weights import distinct_parameters


def staged_loss(
    mesh: Any, streams: Sequence[RankStream], parameters: Any, groups: int, schedule: str, **chosen: Any
) -> Tensor:
    """This rank's share of the loss, "pp=P cp=P tp=I"."""
    leaves = flat(parameters)
    sizes = config_of({"p": HEAD_DIM, "j": groups, "tp": mesh.size("tp")}, leaves)
    config = HybridConfig(**sizes | {"vocab_size": mesh.total("v")})

    def run(*values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        model = filled(mesh, config, dict(zip(leaves, values, strict=True)), **chosen)
        built, loss, stages = in_stages(mesh, model, streams, schedule)
        shares = staged_step(built, stages, loss, streams, [mesh["cp"]])
        outcome = {name: local_gradient(p) for name, p in distinct_parameters(stages).items() if p.grad is not None}
        return sum(shares, torch.zeros((), dtype=accumulator(values[0].dtype))), outcome

    return Stepped.apply(run, tuple(leaves), *leaves.values())


def in_stages(mesh: Any, model: HybridLM, streams: Sequence[RankStream], schedule: str) -> tuple[Any, StepLoss, Any]:
    """(schedule, its loss, the stages of this rank), a micro-batch for each stream."""
    loss = StepLoss(mesh["tp"], model.config.vocab_size)
    built, _, _, _, stages = pipeline_model(
        model,
        mesh.device_mesh,
        None,
        pp_axis_name="pp",
        dp_axis_names=(),
        cp_axis_name="cp",
        tp_axis_name="tp",
        layers_per_stage=None,
        pipeline_parallel_schedule_csv=None,
        pipeline_parallel_schedule=schedule,
        microbatch_size=1,
        local_batch_size=len(streams),
        device=torch.device(mesh.device_mesh.device_type),
        loss_fn=loss,
        patch_inner_model=False,
        patch_causal_lm_model=False,
        seq_len=streams[0].ids.shape[1],
    )
    return built, loss, stages


def filled(mesh: Any, config: HybridConfig, values: dict[str, Tensor], **chosen: Any) -> HybridLM:
    """The model over tp with this rank's shards of these parameters; no random state moves."""
    first = next(iter(values.values()))
    with torch.random.fork_rng(devices=[]):
        model = HybridLM(config, Placement(mesh["cp"], mesh["tp"], **chosen), device=first.device, dtype=first.dtype)
    if mesh.size("tp") > 1:
        parallelize_module(model, mesh.device_mesh["tp"], tensor_parallel_plan(config.layers), src_data_rank=None)
        if config.is_tied:
            model.lm_head.weight = model.embed_tokens.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(values[name])
    return model


def local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter's gradient."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return gradient
