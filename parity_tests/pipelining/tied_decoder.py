"""A small decoder with tied weights in stages, and the gradient of each copy of a tied weight after a step."""

import os
import tempfile
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from parity_tests.pipelining.sharded_decoder import Decoder, Residual
from parity_tests.pipelining.written_orders import fill_and_drain
from torch_impl.pipelining import write_csv
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.order import Action
from torch_impl.pipelining.partition import stage_ids_this_rank
from torch_impl.pipelining.schedule import build_pipeline_schedule, scale_grads_by_divisor
from torch_impl.pipelining.shapes import _precompute_stage_shapes, reset_pp_stage_shapes
from torch_impl.pipelining.split import split_model_into_stages
from torch_impl.pipelining.tied_weights import distinct_parameters

RATE = 0.1
LAYERS = 12  # as numbers of one digit and of two
SHARED_LAYERS = (1, 10)
FROM_LAST = "from the last rank"
TIES = ("one", "frozen", "absent", "transposed", "two", "half")
STATED = ("plainly", "for both", "for text")  # where a configuration states the model's sizes
INTO, OUT = 3.0, 2.0  # factors of what enters the first stage's layers, and of what leaves the last stage


class WithoutGradient(nn.Linear):
    """A head with a trained weight that no loss reaches."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach())


def tied(tie, table, layers, norm):
    """A decoder with one weight for table and head, or with further shared, frozen or transposed weights."""
    model = Decoder((table, *layers, norm, table))
    if tie == "absent":
        model.lm_head.__class__ = WithoutGradient
    shared = model.embed_tokens.weight
    if tie == "transposed":
        shared = nn.Parameter(shared.detach().t().contiguous().t())
        model.embed_tokens.weight = shared
    model.lm_head.weight = shared
    if tie == "two":
        one, other = SHARED_LAYERS
        model.layers[other].weight = model.layers[one].weight
    shared.requires_grad_(tie != "frozen")
    return model


def loss_of(logits, target):
    return ((logits - target) ** 2).sum() / 2


def in_stages(mesh, model, schedule, **options):
    """This rank's stages of a model."""
    stages, _ = split_model_into_stages(
        model, mesh.device_mesh, "pp", schedule, torch.device(mesh.device_mesh.device_type), **options
    )
    return stages


def scheduled(mesh, model, name, microbatches):
    """This rank's stages and their schedule, by a name, or from a file in which the last rank has the first stages."""
    if name != FROM_LAST:
        stages = in_stages(mesh, model, name)
        return stages, build_pipeline_schedule(None, name, 1, microbatches, stages, loss_of)
    ranks = mesh.size("pp")
    order = fill_and_drain([ranks - 1 - stage // 2 for stage in range(2 * ranks)], microbatches)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        write_csv([[Action(*each) for each in row] for row in order], path)
        stages = in_stages(mesh, model, None, pipeline_parallel_schedule_csv=path)
        return stages, build_pipeline_schedule(path, None, 1, microbatches, stages, loss_of)


def stepped(schedule, stages, token, target, step=None):
    """The losses of a step on the rank of the last stage; `step` is the schedule's own, or its evaluation."""
    local, losses = {stage.stage_index for stage in stages}, []
    last = {"target": target, "losses": losses} if stages[0].num_stages - 1 in local else {}
    (step or schedule.step)(*([token] if 0 in local else []), **last)
    return losses


def tied_gradients(mesh, tie, steps, name, token, target, table, layers, norm):
    """The loss, the gradients of both copies and of the layers after some steps, and the findings.

    An evaluation comes first and leaves no gradient; after each step every stage moves its own parameters.
    """
    stages, schedule = scheduled(mesh, tied(tie, table, layers, norm), name, len(token))
    loss = table.new_zeros(())
    if tie == "half":
        accepted = is_accepted(schedule, stages, token, target)
        count = sum(p.numel() for p in distinct_parameters(stages).values())
        nothing = torch.zeros_like(table)
        return loss, nothing, nothing, torch.zeros_like(layers), *map(table.new_tensor, (float(count), float(accepted)))
    if name == "GPipe":  # torch does not evaluate by the others over every number of ranks
        stepped(schedule, stages, token, target, schedule.eval)
    astray = sum(p.grad is not None for s in stages for p in s.submod.parameters())
    for _ in range(steps):
        loss = loss + sum(stepped(schedule, stages, token, target), table.new_zeros(())).detach()
        parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        torch.optim.SGD(dict.fromkeys(parameters), lr=RATE).step()
    astray += sum(not p.requires_grad and p.grad is not None for s in stages for p in s.submod.parameters())
    scale_grads_by_divisor(stages, len(token) * steps)
    first, second, of_layers = torch.zeros_like(table), torch.zeros_like(table), torch.zeros_like(layers)
    for stage in stages:
        if stage.is_first and stage.submod.embed_tokens.weight.grad is not None:
            first += stage.submod.embed_tokens.weight.grad
        if stage.is_last and stage.submod.lm_head.weight.grad is not None:
            second += stage.submod.lm_head.weight.grad
        for number, layer in stage.submod.layers.items():
            of_layers[int(number)] += layer.weight.grad
    count = sum(p.numel() for p in distinct_parameters(stages).values())
    return loss / steps, first, second, of_layers, table.new_tensor(float(count)), table.new_tensor(float(astray))


def change_ends(stages):
    """Change a module of the first stage that every stage has, and hook the last stage."""
    for stage in stages:
        if stage.is_first:
            stage.submod.rotary_emb.factor = INTO
        if stage.is_last:
            stage.submod.register_forward_hook(lambda module, arguments, y: OUT * y)


def is_accepted(schedule, stages, token, target):
    """Whether a step goes through although one copy of a tied weight is frozen. One stage has no second copy."""
    if stages[0].num_stages == 1:
        return False
    copies = [(stage.submod.embed_tokens if stage.is_first else stage.submod.lm_head) for stage in stages]
    for stage in stages:
        if stage.is_first:
            stage.submod.embed_tokens.weight.requires_grad_(False)
    try:
        stepped(schedule, stages, token, target)
    except ValueError:
        return False
    return any(copy is not None for copy in copies)


def step_of_shared_stages(mesh, name, x, target, weight):
    """The loss and the gradient of a weight that all stages of this rank have, divided by the micro-batches."""
    pp, place = mesh.size("pp"), torch.device(mesh.device_mesh.device_type)
    layer = Residual(weight)
    stages = [
        PipelineStage(nn.Sequential(layer), stage, 2 * pp, place, group=mesh["pp"])
        for stage in stage_ids_this_rank(mesh.rank("pp"), pp, 2 * pp, RULES[name].style)
    ]
    schedule = build_pipeline_schedule(None, name, x.shape[1], x.shape[0] * x.shape[1], stages, loss_of)
    losses = stepped(schedule, stages, x.flatten(0, 1), target.flatten(0, 1))
    scale_grads_by_divisor(stages, len(x))
    return sum(losses, weight.new_zeros(())).detach(), layer.weight.grad


def with_views(values, has_head, stated):
    """A decoder whose layers return views. Its configuration, or that of its text, states the sizes of hidden states.

    Sizes that a multimodal configuration states itself are the model's; of its text the others are then.
    """
    model = Decoder(values, returns_views=True, has_head=has_head)
    own = model.config
    if stated == "for text":
        model.config = SimpleNamespace(text_config=own)
    elif stated == "for both":
        own.text_config = SimpleNamespace(hidden_size=own.hidden_size + 1, vocab_size=own.vocab_size + 1)
    return model


def told_again(mesh, name, token, target, model, options):
    """Losses and gradients of steps of several shapes, and how many layers each stage has.

    A step has another micro-batch, another length, another dtype. The first and the last stage are changed, and no
    other stage. `options` divide the layers over the stages.
    """
    config, dtype = model.config, target.dtype
    stages = in_stages(mesh, model, name, **options)
    change_ends(stages)
    counts = {stage.stage_index: len(stage.submod.layers) for stage in stages}
    rows, length = token.shape
    by_two, by_one = (
        build_pipeline_schedule(None, name, size, rows, each, loss_of)
        for size, each in ((2, stages), (1, stages[::-1]))
    )
    _precompute_stage_shapes(stages, config, 2, length)
    losses = [stepped(by_two, stages, token, target)]
    reset_pp_stage_shapes(by_one, stages, config, 1, length)
    losses.append(stepped(by_one, stages, token, target))
    reset_pp_stage_shapes(by_two, stages, config, 2, length - 1)
    losses.append(stepped(by_two, stages, token[:, :-1], target[:, :-1]))
    for stage in stages:
        stage.submod.to(torch.float64)
    reset_pp_stage_shapes(by_two, stages, config, 2, length - 1)
    losses.append(stepped(by_two, stages, token[:, :-1], target[:, :-1].double()))
    total = [sum(each, target.new_zeros(())).detach().to(dtype) for each in losses]
    gradients = {leaf: p.grad.to(dtype) for stage in stages for leaf, p in stage.submod.named_parameters()}
    return torch.stack(total), gradients, counts
