"""Models of transformers in stages under a schedule, and the same models whole, one micro-batch after the other."""

import torch
from torch import nn
from torch.nn import functional as F

from parity_tests.parallelizer.families import Chosen, batch, model_of
from torch_impl.pipelining.schedule import build_pipeline_schedule
from torch_impl.pipelining.split import split_model_into_stages

LAYERS, ROWS, LENGTH = 8, 2, 5
# |a - b| / |b| of a step's loss and of each parameter's gradient, in float64: pipelining's promise where tensor
# parallelism or FSDP2 adds in another order than one process.
PROMISED = 1e-12


def chosen(family, tied, layers=LAYERS):
    return Chosen(family, tied, (("num_hidden_layers", layers),))


def tokens(of, n):
    return [torch.from_numpy(x) for x in batch(of, n * ROWS, LENGTH)]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def stepped(mesh, case):
    """Some steps on one rank: losses of the last, gradients by name, and names that two stages have."""
    of, n = chosen(case.family, case.tied, case.layers), case.n
    ids, targets = tokens(of, n)
    stages, _ = split_model_into_stages(
        model_of(of, getattr(torch, case.dtype)), mesh.device_mesh, "pp", case.name, torch.device("cpu"), **case.cut
    )
    schedule = build_pipeline_schedule(None, case.name, ROWS, n * ROWS, stages, loss_of)
    stage_ids, losses = {stage.stage_index: stage for stage in stages}, []
    for _ in range(case.steps):
        schedule.step(
            *([ids] if 0 in stage_ids else []),
            **({"target": targets, "losses": losses} if stages[0].num_stages - 1 in stage_ids else {}),
        )
    gradients = {
        name: parameter.grad.numpy().tobytes()
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }
    return [loss.item() for loss in losses], gradients


def accumulated(of, n, dtype, order, steps=1):
    """The full model, its micro-batches in this order; a tied head has a copy, whose gradient is added at each end."""
    tied = of.tied
    model = model_of(of, getattr(torch, dtype))
    pair = (model.model.embed_tokens.weight, model.lm_head.weight)
    if tied:
        model.lm_head.weight = nn.Parameter(pair[0].detach().clone())
        pair = (pair[0], model.lm_head.weight)
    ids, targets = (x.split(ROWS) for x in tokens(of, n))
    losses, both = {}, None
    for _ in range(steps):
        for parameter in pair if tied else ():
            parameter.grad = None
        for m in order:
            loss = loss_of(model(ids[m], use_cache=False).logits, targets[m])
            loss.backward()
            losses[m] = loss.item()
        if tied:
            total = pair[0].grad + pair[1].grad
            both = total if both is None else both + total
    for parameter in pair if tied else ():
        parameter.grad = both
    return [losses[m] for m in range(n)], {
        name: parameter.grad.numpy().tobytes() for name, parameter in model.named_parameters()
    }
