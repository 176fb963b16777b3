"""A stack of residual layers, split into stages, under any schedule: by name, or from a file with its order."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from torch_impl.pipelining import schedule_order, simulate, write_csv
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.partition import (
    calculate_virtual_stages,
    generate_hf_model_fqn_per_model_part,
    stage_ids_this_rank,
    stage_to_rank,
)
from torch_impl.pipelining.schedule import build_pipeline_schedule, executed_actions, scale_grads_by_divisor

STEPS = 2


class Layers(nn.Module):
    """x + tanh(x w1) w2, for some of the layers."""

    def __init__(self, layers, w1, w2):
        super().__init__()
        self.layers = layers
        self.w1 = nn.ParameterList(w1[layer].detach().clone() for layer in layers)
        self.w2 = nn.ParameterList(w2[layer].detach().clone() for layer in layers)

    def forward(self, x):
        for w1, w2 in zip(self.w1, self.w2, strict=True):
            x = x + torch.tanh(x @ w1) @ w2
        return x


def layers_of(stage, stages, layers):
    names = generate_hf_model_fqn_per_model_part(stages, layers, include_multimodal_encoders=False)[stage]
    return [int(name.rpartition(".")[2]) for name in names if ".layers." in name]


def cut(mesh, w1, w2, name):
    """The stages of this rank, two on each unless the schedule has one."""
    rule, ranks, layers = RULES[name], mesh.size("pp"), len(w1)
    count, _ = calculate_virtual_stages(layers, None, ranks, rule.is_single)
    return [
        PipelineStage(Layers(layers_of(stage, count, layers), w1, w2), stage, count, w1.device, group=mesh["pp"])
        for stage in stage_ids_this_rank(mesh.rank("pp"), ranks, count, rule.style)
    ]


def scheduled(mesh, stages, name, source, n, size, loss):
    """The schedule by name, or from a file with its order, and its figures on paper."""
    count, ranks = stages[0].num_stages, mesh.size("pp")
    order = schedule_order(name, ranks, n, count // ranks)
    timeline = simulate(order, stage_to_rank(ranks, count, RULES[name].style))
    if source == "name":
        return build_pipeline_schedule(None, name, size, n * size, stages, loss), timeline
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write_csv(order, path)
        return build_pipeline_schedule(str(path), None, size, n * size, stages, loss), timeline


def stepped(mesh, x, target, w1, w2, name, source):
    """Two steps and one division: losses of the last step, gradients, and how many actions ran out of turn.

    Actions are recorded by a block for all steps, and by one for each inside it. A division leaves each gradient where
    it is: an optimizer may hold it.
    """
    n, size = x.shape[:2]
    stages = cut(mesh, w1, w2, name)
    schedule, timeline = scheduled(mesh, stages, name, source, n, size, lambda y, t: ((y - t) ** 2).sum() / 2)
    stage_ids = {stage.stage_index for stage in stages}
    losses, executed = [], []
    last = {"target": target.flatten(0, 1), "losses": losses} if stages[0].num_stages - 1 in stage_ids else {}
    with executed_actions(stages) as in_all_steps:
        for _ in range(STEPS):
            with executed_actions(stages) as actions:
                schedule.step(*([x.flatten(0, 1)] if 0 in stage_ids else []), **last)
            executed += actions
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    held = [parameter.grad for parameter in parameters]
    scale_grads_by_divisor(stages, n * STEPS)
    due = [event.action for event in timeline.of(mesh.rank("pp"))] * STEPS
    astray = sum(one != other for one, other in zip(executed, due, strict=True))
    astray += in_all_steps != due
    astray += sum(parameter.grad is not gradient for parameter, gradient in zip(parameters, held, strict=True))
    return {
        "losses": torch.stack(losses).detach() if losses else x.new_zeros(n),
        "w1": gathered(stages, "w1", w1),
        "w2": gathered(stages, "w2", w2),
        "astray": x.new_full((n,), float(astray)),
    }


def gathered(stages, name, like):
    """Gradients of this rank's layers where they belong, 0 elsewhere."""
    gradient = torch.zeros_like(like)
    for stage in stages:
        for layer, parameter in zip(stage.submod.layers, getattr(stage.submod, name), strict=True):
            gradient[layer] += parameter.grad
    return gradient
