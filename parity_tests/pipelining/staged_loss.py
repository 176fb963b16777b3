"""A model in stages as a function of its parameters: forward runs a schedule, backward returns its gradients."""

from __future__ import annotations

import torch

from parity_tests.parallelizer.families import model_of
from parity_tests.parallelizer.training import summed_loss
from parity_tests.pipelining.stepped import Stepped
from shardproof.declare.declared import flat
from torch_impl.pipelining.pipeline import pipeline_model
from torch_impl.pipelining.schedule import scale_grads_by_divisor

STEPS = 2


def staged_loss(mesh, chosen, parameters, ids, targets, schedule, has_seq_len):
    """The mean loss over all tokens on the rank of the last stage, 0 on others; rows are micro-batches."""
    leaves = flat(parameters)
    tokens = (targets >= 0).sum()

    def run(*values):
        model = filled(chosen, dict(zip(leaves, values, strict=True)))
        built, _, has_first, has_last, stages = pipeline_model(
            model,
            mesh.device_mesh,
            None,
            pp_axis_name="pp",
            dp_axis_names=(),
            layers_per_stage=None,
            pipeline_parallel_schedule_csv=None,
            pipeline_parallel_schedule=schedule,
            microbatch_size=1,
            local_batch_size=len(ids),
            device=ids.device,
            loss_fn=lambda logits, target: summed_loss(logits, target) / tokens,
            seq_len=ids.shape[1] if has_seq_len else None,
        )
        losses = []
        for _ in range(STEPS):
            last = {"target": targets, "losses": losses} if has_last else {}
            built.step(*([ids] if has_first else []), **last)
        scale_grads_by_divisor(stages, STEPS)
        gradients = {name: p.grad for stage in reversed(stages) for name, p in stage.submod.named_parameters()}
        return sum(losses, values[0].new_zeros(())).detach(), gradients

    return Stepped.apply(run, tuple(leaves), *leaves.values())


def filled(chosen, values):
    """The model with these values, in their dtype; no random state moves."""
    first = next(iter(values.values()))
    with torch.random.fork_rng(devices=[]):
        model = model_of(chosen, first.dtype).to(first.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model
