"""A small model in stages, a schedule over it on each rank, and the same on one device without stages."""

import itertools
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.utils import skip_init

from torch_impl.pipelining import stage_to_rank
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.order import computations
from torch_impl.pipelining.schedule import build_pipeline_schedule, executed_actions

WIDTH, PER_MICROBATCH = 3, 2


def part(stage, dtype):
    """One stage: linear, gelu, linear, with values that stage and place decide."""
    sizes = ((WIDTH, 4), (4, WIDTH))
    first, second = (skip_init(nn.Linear, *size, dtype=dtype) for size in sizes)  # no random state moves
    module = nn.Sequential(first, nn.GELU(), second)
    source = torch.Generator().manual_seed(100 + stage)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return module


def batch(n, dtype):
    """Inputs and targets of n micro-batches."""
    source = torch.Generator().manual_seed(7)
    both = torch.randn(2, n * PER_MICROBATCH, WIDTH, generator=source, dtype=torch.float64)
    return both.to(dtype).unbind()


def loss_of(output, target):
    return ((output - target) ** 2).sum()


def gradients(modules):
    """{name: bytes} of stages by their number."""
    return {
        f"{stage}.{name}": parameter.grad.numpy().tobytes()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def made_stages(mesh, placed, dtype):
    """{stage: PipelineStage} of this rank."""
    group = mesh["pp"]
    return {
        stage: PipelineStage(part(stage, dtype), stage, len(placed), torch.device("cpu"), group=group)
        for stage, rank in enumerate(placed)
        if rank == mesh.rank("pp")
    }


def stepped(mesh, case):
    """Build and step on one rank: losses, gradients, and the order of computation."""
    options = dict(case.options)
    dtype = getattr(torch, case.dtype)
    n, placed, name, path = options["n"], options["placed"], options["name"], options.get("csv")
    stages = made_stages(mesh, placed, dtype)
    schedule = build_pipeline_schedule(path, name, PER_MICROBATCH, n * PER_MICROBATCH, list(stages.values()), loss_of)
    inputs, target = batch(n, dtype)
    steps = []
    for _ in range(options.get("steps", 1)):
        losses = []
        with executed_actions(list(stages.values())) as actions:
            schedule.step(
                *([inputs] if 0 in stages else []),
                **({"target": target, "losses": losses} if len(placed) - 1 in stages else {}),
            )
        steps.append([str(action) for action in actions])
    modules = {stage: each.submod for stage, each in stages.items()}
    return {"losses": [loss.item() for loss in losses], "gradients": gradients(modules), "executed": steps}


def accumulated(stages, n, dtype, orders=None, steps=1):
    """The unsplit model: losses of each micro-batch, and gradients added stage by stage in a given order of them."""
    dtype = getattr(torch, dtype)
    modules = {stage: part(stage, dtype) for stage in range(stages)}
    inputs, target = (x.split(PER_MICROBATCH) for x in batch(n, dtype))
    losses, single = [], []
    for m in range(n):
        x = inputs[m]
        for module in modules.values():
            module.zero_grad()
            x = module(x)
        losses.append(loss_of(x, target[m]))
        losses[m].backward()
        single.append({stage: [p.grad.clone() for p in module.parameters()] for stage, module in modules.items()})
        losses[m] = losses[m].item()
    for stage, module in modules.items():
        module.zero_grad()
        for _, m in itertools.product(range(steps), orders[stage] if orders else range(n)):
            for p, grad in zip(module.parameters(), single[m][stage], strict=True):
                p.grad = grad.clone() if p.grad is None else p.grad + grad
    return losses, gradients(modules)


def last_backwards(order):
    """{stage: micro-batches in the order in which their weight gradients are made}."""
    orders = defaultdict(list)
    for actions in order:
        for action in computations(actions):
            if action.kind in "BW":
                orders[action.stage].append(action.microbatch)
    return orders


def placement(name, p, v):
    return stage_to_rank(p, p * v, RULES[name].style)


def written(folder, text):
    path = Path(folder) / "schedule.csv"
    path.write_text(text)
    return str(path)
