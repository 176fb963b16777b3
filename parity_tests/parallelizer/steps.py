"""A training step as a scheme: the parameters of a decoder as inputs, the mean loss as output.

A step leaves gradients on a model and returns none, so an autograd function wraps it. Its forward builds a model with
the given values, shards it over the mesh and computes the loss of this rank's tokens. Its backward runs the backward of
the model and returns each parameter's full gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parity_tests.parallelizer.families import Chosen, empty, exact
from parity_tests.parallelizer.training import summed_loss
from shardproof.declare.declared import flat
from torch_impl.collectives import all_reduce
from torch_impl.parallelizer import to_cpu
from torch_impl.parallelizer.mesh_axes import MeshAxes, mesh_axes

Parallelize = Callable[..., nn.Module]


def specs(chosen: Chosen, axes: Sequence[str]) -> dict[str, Any]:
    """The parameters as a tree of specs; each rank has whole parameters and whole gradients."""
    types, letters, tree = " ".join(f"{axis}=I" for axis in axes), _letters(chosen), {}
    for name, shape in _shapes(chosen).items():
        *folders, leaf = name.split(".")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[leaf] = f"{' '.join(letters[size] for size in shape)} {types}"
    return tree


def dims(chosen: Chosen) -> dict[str, tuple[int, ...]]:
    """The letters of the specs, each with its one size."""
    used = {size for shape in _shapes(chosen).values() for size in shape}
    return {letter: (size,) for size, letter in _letters(chosen).items() if size in used}


def parameter_counts(chosen: Chosen, ranks: int) -> tuple[int, int, int]:
    """Elements in the blocks and in the rest, with first dims rounded up to multiples of `ranks`; and parameters."""
    shapes = _shapes(chosen)
    padded = {name: -(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for name, shape in shapes.items()}
    blocks = sum(size for name, size in padded.items() if ".layers." in name)
    return blocks, sum(padded.values()) - blocks, len(shapes)


def mean_loss(
    mesh: Any, chosen: Chosen, parameters: Mapping[str, Any], ids: Tensor, targets: Tensor, parallelize: Parallelize,
    microbatches: int = 1,
) -> Tensor:  # fmt: skip
    """The mean loss over the tokens of all ranks, a function of the parameters."""
    axes, leaves = mesh_axes(mesh.device_mesh), flat(parameters)
    tokens = all_reduce((targets >= 0).sum(), axes.loss_mesh.get_group(), out="R")

    def local_loss(*values: Tensor) -> tuple[nn.Module, list[Tensor]]:
        model = parallelize(_model_with(chosen, dict(zip(leaves, values, strict=True))), mesh.device_mesh)
        parts = zip(ids.chunk(microbatches), targets.chunk(microbatches), strict=True)
        return model, [summed_loss(model(input_ids=i).logits, t) / tokens for i, t in parts]

    return reduced_loss(axes, leaves, local_loss)


def reduced_loss(axes: MeshAxes, values: Mapping[str, Tensor], local_loss: Callable[..., Any]) -> Tensor:
    """The sum of the data ranks' losses, a function of the parameters; `values` has them by their names in the model.

    `local_loss` takes the values, and returns a parallelized model and its losses, one for each microbatch.
    """
    addend = _Step.apply(local_loss, tuple(values), axes.data_size, *values.values())
    return all_reduce(addend, axes.loss_mesh.get_group(), out="I")


class _Step(torch.autograd.Function):
    """The loss of a rank's tokens forward; backward the gradient that the parallelizer left on each parameter."""

    @staticmethod
    def forward(ctx, local_loss, names, ranks, *values):
        with torch.enable_grad():
            ctx.model, ctx.losses = local_loss(*(value.detach() for value in values))
        ctx.names, ctx.ranks = names, ranks
        return torch.stack([loss.detach() for loss in ctx.losses]).sum()

    @staticmethod
    def backward(ctx, cotangent):
        for number, loss in enumerate(ctx.losses):
            ctx.model.set_requires_gradient_sync(number == len(ctx.losses) - 1)
            loss.backward(ctx.ranks * cotangent)
        gradients = {name: _full_gradient(x).to(cotangent.device) for name, x in ctx.model.named_parameters()}
        return None, None, None, *(gradients[name] for name in ctx.names)


def _full_gradient(parameter: Tensor) -> Tensor:
    """The gradient of the full parameter; zeros if it has none."""
    return torch.zeros(parameter.shape) if parameter.grad is None else to_cpu(parameter.grad)


def _model_with(chosen: Chosen, values: Mapping[str, Tensor]) -> Any:
    """The model with these values, in their dtype."""
    dtype = next(iter(values.values())).dtype
    with torch.random.fork_rng(devices=[]):
        model = exact(chosen, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


def _shapes(chosen: Chosen) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in empty(chosen, device="meta").named_parameters()}


def _letters(chosen: Chosen) -> dict[int, str]:
    """A letter for each size; two dims of equal size have the letter of the first."""
    config = chosen.config
    heads, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    named = {"v": config.vocab_size, "d": config.hidden_size, "i": config.intermediate_size, "h": heads, "g": keys}
    named |= {"p": config.head_dim, "q": heads + 2 * keys, "u": 2 * config.intermediate_size}
    return {size: letter for letter, size in reversed(named.items())}
