"""A small decoder in stages under FSDP, with a schedule by name or from a file, and steps of two lengths."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import skip_init

from parity_tests.pipelining.perceptron import written
from parity_tests.pipelining.stepped import Stepped
from parity_tests.pipelining.written_orders import dumped, with_communication
from torch_impl.parallelizer import to_cpu
from torch_impl.pipelining import schedule_order, stage_to_rank
from torch_impl.pipelining.named_schedules import RULES
from torch_impl.pipelining.pipeline import pipeline_model
from torch_impl.pipelining.shapes import reset_pp_stage_shapes

MICROBATCHES = 4  # a number that every schedule takes over 1 or 2 ranks
LAYERS_OF = {1: (5,), 2: (3, 2), 4: (1, 2, 1, 1)}  # of each stage, where a caller divides them
NAMES = ("embed_tokens.weight", *(f"layers.{layer}.weight" for layer in range(5)), "norm.weight", "lm_head.weight")


class Residual(nn.Module):
    """x + tanh(x w). With `returns_view` the output is a view of a tensor with all tokens in one dim."""

    def __init__(self, weight, returns_view=False):
        super().__init__()
        self.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
        self.returns_view = returns_view

    def forward(self, x):
        y = x + torch.tanh(x @ self.weight)
        return y.flatten(0, 1).view_as(x) if self.returns_view else y


class Factor(nn.Module):
    """Multiply the input by a number, which is 1 at first."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return x if self.factor == 1.0 else x * self.factor


class Scale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))

    def forward(self, x):
        return x * self.weight


class Decoder(nn.Module):
    """Ids to logits, or without a head to hidden states; every stage needs `rotary_emb`, which has no parameters."""

    def __init__(self, values, returns_views=False, has_head=True):
        super().__init__()
        embedding, *layers, norm, head = values
        self.embed_tokens = skip_init(nn.Embedding, *embedding.shape, dtype=embedding.dtype)
        self.rotary_emb = Factor()
        self.layers = nn.ModuleList(Residual(weight, returns_views) for weight in layers)
        self.norm = Scale(norm)
        if has_head:
            self.lm_head = skip_init(nn.Linear, *reversed(head.shape), bias=False, dtype=head.dtype)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(embedding)
            if has_head:
                self.lm_head.weight.copy_(head)
        self.config = SimpleNamespace(hidden_size=embedding.shape[1], vocab_size=embedding.shape[0])

    def forward(self, input_ids=None, inputs_embeds=None, use_cache=None):
        x = self.rotary_emb(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else x


class Wrapper(nn.Module):
    """A module around a part, which declares the shapes of the stage's inputs and outputs."""

    def __init__(self, part, sizes):
        super().__init__()
        self.part, self.sizes = part, sizes

    def forward(self, x):
        return self.part(x)

    def get_pipeline_stage_metas(self, is_first, microbatch, length, dtype):
        def floats(width):
            return torch.empty(microbatch, length, width, dtype=dtype, device="meta", requires_grad=True)

        width, vocab = self.sizes
        ids = torch.empty(microbatch, length, dtype=torch.int64, device="meta")
        return [ids if is_first else floats(width)], [floats(width if self.part.lm_head is None else vocab)]


def parallelize_by(shape, sizes, is_wide):
    """A function that shards a part in place, and returns nothing, the part, or a module around it.

    The output of a part is in its dtype, or in float64 if it `is_wide`.
    """

    def parallelize(part, world_mesh, moe_mesh, *, dp_axis_names, **axes):
        root = Wrapper(part, sizes) if shape == "wrapped" else part
        mesh, dtype = world_mesh[dp_axis_names[0]], next(part.parameters()).dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype) if is_wide else MixedPrecisionPolicy()
        of_root = replace(policy, output_dtype=torch.float64) if is_wide else policy
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(root, mesh=mesh, mp_policy=of_root, reshard_after_forward=False)
        return None if shape == "in place" else root

    return parallelize


def stage_names(count):
    """The names of each stage's modules: unequal numbers of layers, and a module that this model lacks."""
    stages, start = [], 0
    for layers in LAYERS_OF[count]:
        stages.append([f"layers.{layer}" for layer in range(start, start + layers)])
        start += layers
    stages[0] = ["vision_tower", "embed_tokens", *stages[0]]
    stages[-1] += ["norm", "lm_head"]
    return stages


def file_of(name, ranks, count, source, folder):
    """The order of a schedule as a file: alone, with all communication, or with all but some reductions."""
    order, placed = (
        schedule_order(name, ranks, MICROBATCHES, count // ranks),
        stage_to_rank(ranks, count, RULES[name].style),
    )
    if "complete" in source:
        order = with_communication(order, placed, MICROBATCHES)
    if "but" in source:  # no reductions, or none of a rank's second stage
        left_out = 0 if source == "complete but reductions" else ranks
        order = [
            [each for each in row if not each or each.kind != "REDUCE_GRAD" or each.stage < left_out] for row in order
        ]
    return written(folder, dumped(order))


# These schedules halve backwards, and torch cannot reduce halved gradients per micro-batch. HALF finds halves in files.
HALVED = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
HALF = re.compile(r"\d[IW]\d")


def build_pipeline(mesh, model, device, size, name, source, names, shape, is_wide, reduction, seq_len):
    """The result of `pipeline_model`, and whether it accepts reductions after each micro-batch wrongly.

    Where it must reject these reductions, the result is without them.
    """
    count = mesh.size("pp") * (1 if RULES[name].is_single else 2)
    data, sizes = mesh.size("dp"), (model.config.hidden_size, model.config.vocab_size)
    arguments = {
        "pp_axis_name": "pp",
        "dp_axis_names": ("dp",),
        "layers_per_stage": None,
        "pipeline_parallel_schedule_csv": None,
        "pipeline_parallel_schedule": name if source in ("name", "both") else None,
        "microbatch_size": size,
        "local_batch_size": MICROBATCHES * size,
        "device": device,
        "loss_fn": lambda y, t: data * ((y - t) ** 2).sum() / 2,  # FSDP takes the mean over ranks of data
        "parallelize_fn": parallelize_by(shape, sizes, is_wide),
        "module_fqns_per_model_part": stage_names(count) if names == "typed" else None,
        "patch_stage_backward_maybe_with_nosync": reduction == "once",
        "reduce_grad_per_microbatch": reduction == "each",
        "seq_len": seq_len,
    }
    with tempfile.TemporaryDirectory() as folder:
        is_halved = name in HALVED
        if source != "name":
            path = file_of(name, mesh.size("pp"), count, source, folder)
            is_halved = bool(HALF.search(Path(path).read_text()))
            arguments["pipeline_parallel_schedule_csv"] = path
        if reduction == "each" and is_halved:
            is_astray = not is_rejected(model, mesh.device_mesh, None, **arguments)
            arguments["reduce_grad_per_microbatch"] = False
            return pipeline_model(model, mesh.device_mesh, None, **arguments), is_astray
        return pipeline_model(model, mesh.device_mesh, None, **arguments), False


def is_rejected(*arguments, **options):
    try:
        pipeline_model(*arguments, **options)
    except ValueError:
        return True
    return False


def sharded_loss(mesh, token, target, weights, name, source, names, shape, is_wide, reduction, has_seq_len):
    """The loss of two steps on the rank of the last stage; the second step has one position less.

    It also returns a count of mistakes: reductions that are accepted wrongly, and stages that infer shapes they were
    given, or do not infer missing ones.
    """
    size, astray = len(token) // MICROBATCHES, []

    def run(*values):
        model, seq_len = Decoder(values), token.shape[1] if has_seq_len else None
        (schedule, parts, has_first, has_last, stages), is_astray = build_pipeline(
            mesh, model, token.device, size, name, source, names, shape, is_wide, reduction, seq_len
        )
        loss = values[0].new_zeros(())
        for length in (token.shape[1], token.shape[1] - 1):
            if length < token.shape[1]:
                reset_pp_stage_shapes(schedule, stages, model.config, size, length)
            losses = []
            last = {"target": target[:, :length], "losses": losses} if has_last else {}
            schedule.step(*([token[:, :length]] if has_first else []), **last)
            loss = sum(losses, loss).detach()
            has_shapes = has_seq_len or length < token.shape[1]
            modes = [stage._inference_mode.name for stage in stages if hasattr(stage, "_inference_mode")]  # not in 2.11
            astray.extend((mode == "STATIC") != has_shapes for mode in modes)
        astray.append(is_astray)
        gradients = {
            leaf.removeprefix("part."): to_cpu(parameter.grad).to(token.device)
            for part in parts
            for leaf, parameter in part.named_parameters()
        }
        return loss.to(values[0].dtype) / mesh.size("dp"), gradients

    return {"loss": Stepped.apply(run, NAMES, *weights), "astray": target.new_tensor(float(sum(astray)))}
