"""A small decoder in the stages of `AutoPipeline`, by a name or a file, with shapes that are told or inferred."""

import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

from parity_tests.pipelining.sharded_decoder import MICROBATCHES, NAMES, Decoder, Residual, file_of
from parity_tests.pipelining.tied_decoder import loss_of
from torch_impl.pipelining.adapters.automodel import AutoPipeline
from torch_impl.pipelining.named_schedules import RULES

TOLD = ("never", "from the start", "later")  # when stages are told their shapes
WIDE = torch.float64


class WideResidual(Residual):
    """A layer whose product is in the dtype of its weight, and its sum in that of x."""

    def forward(self, x):
        return x + torch.tanh(x.to(self.weight.dtype) @ self.weight)


class WideStream(Decoder):
    """Between its modules numbers are float64, whatever the dtype of its parameters."""

    def __init__(self, values):
        super().__init__(values)
        self.layers = nn.ModuleList(WideResidual(weight) for weight in values[1:-2])
        for module in (self.embed_tokens, self.lm_head):
            module.register_forward_hook(lambda module, arguments, y: y.to(WIDE))
        self.lm_head.register_forward_pre_hook(lambda module, arguments: arguments[0].to(module.weight.dtype))


def built(mesh, model, name, source, told, is_wide, is_scaled, length):
    """The pipeline of a model. A schedule from a file stands beside the default name."""
    ranks, count = mesh.size("pp"), mesh.size("pp") * (1 if RULES[name].is_single else 2)
    options = {} if told == "never" else {"pp_seq_len": length + (told == "later")}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "build_pipeline_schedule|.*scale_grads=True divides the accumulated")
        if source == "name":
            options["pp_schedule"] = name
        else:
            options["pp_schedule_csv"] = file = file_of(name, ranks, count, source, folder)
            if source == "spreadsheet":  # its files begin with a byte order mark
                Path(file).write_text(Path(file).read_text(), encoding="utf-8-sig")
        pipeline = AutoPipeline(
            mesh.device_mesh,
            dp_axis_names=(),
            pp_batch_size=MICROBATCHES,
            device=torch.device(mesh.device_mesh.device_type),
            dtype=WIDE if is_wide else None,
            scale_grads_in_schedule=is_scaled,
            **options,
        )
        return pipeline.build(model, loss_fn=loss_of)


def stepped(mesh, name, source, told, is_wide, is_scaled, token, target, values):
    """Losses of two steps, gradients of the second, numbers of all parameters, of trained ones and of layers.

    Shapes that are told change for the second step, which has one position less; the norm is frozen.
    """
    model = (WideStream if is_wide else Decoder)(values)
    model.norm.requires_grad_(False)
    if told == "never":  # without shapes to be told a model needs no sizes
        del model.config
    pipeline = built(mesh, model, name, source, told, is_wide, is_scaled, token.shape[1])
    total = []
    for length in (token.shape[1], token.shape[1] - (told != "never")):
        if told == "later" or length < token.shape[1]:
            pipeline.update_seq_len(length)
        losses = []
        last = {"target": target[:, :length], "losses": losses} if pipeline.info.has_last_stage else {}
        for part in pipeline.parts:
            part.zero_grad()
        pipeline.step(token[:, :length], **last)
        total.append(sum(losses, values[0].new_zeros(())).detach().to(values[0].dtype))
    gradients = {leaf: p.grad for part in pipeline.parts for leaf, p in part.named_parameters() if p.requires_grad}
    layers = sum(leaf.startswith("layers.") for leaves in pipeline.list_stage_modules() for leaf in leaves)
    counts = [pipeline.get_total_param_count(), sum(pipeline.get_stage_param_counts(trainable_only=True)), layers]
    of_weights = [gradients.get(leaf, torch.zeros_like(value)) for leaf, value in zip(NAMES, values, strict=True)]
    return torch.stack(total), of_weights, values[0].new_tensor(counts)
