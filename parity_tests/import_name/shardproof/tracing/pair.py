"""A PyTorch module and a flax module that should have equal results, and the place of their first difference.

    from shardproof.tracing import Pair, trace_pair

    for line in trace_pair(Pair(torch_module, make_flax, (x,), names={"fc1": "dense_in"})):
        print(line)

The loss is the sum of the output times random numbers, so that every part of the output has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from shardproof.judge import bridge
from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.tracing.comparison import Found, Line, lines, whole
from shardproof.tracing.flax_side import ReferenceTrace, traced
from shardproof.tracing.sides import check_output, check_shape, of_flax, of_torch
from shardproof.tracing.torch_side import Recording, recorded


@dataclass(frozen=True)
class Pair:
    """`make_flax(weights)` builds the flax module from the PyTorch module's weights, by PyTorch's names.

    PyTorch gets floating inputs in its parameters' dtype, flax gets them in float64. `names` maps PyTorch module names
    to flax names where they differ; a name for a parent also applies below it.

    Errors: TypeError for an argument of a wrong type; ValueError for inputs without an element.
    """

    torch_module: nn.Module
    make_flax: Callable[[Mapping[str, Any]], Any]
    inputs: tuple[np.ndarray, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.torch_module, nn.Module):
            raise TypeError(f"Pair: torch_module is a {_kind(self.torch_module)}; pass a torch.nn.Module")
        if not callable(self.make_flax):
            raise TypeError(
                f"Pair: make_flax is a {_kind(self.make_flax)}; pass a function from weights to a flax module"
            )
        if not isinstance(self.inputs, (tuple, list)):
            raise TypeError(f"Pair: inputs is a {_kind(self.inputs)}; pass a tuple of arrays, such as (x,)")
        wrong = [i for i, x in enumerate(self.inputs) if not isinstance(x, np.ndarray)]
        if wrong:
            raise TypeError(f"Pair: inputs[{wrong[0]}] is a {_kind(self.inputs[wrong[0]])}; pass NumPy arrays")
        if self.inputs and not any(x.size for x in self.inputs):
            raise ValueError("Pair: the inputs have no element, and nothing could differ; pass a token or more")
        if not isinstance(self.names, Mapping):
            raise TypeError(f"Pair: names is a {_kind(self.names)}; pass a dict, such as {{'fc1': 'dense_in'}}")

    def flax_name(self, name: str) -> str:
        """The name of a module on the flax side: its longest prefix in `names` is replaced."""
        head, tail = name, ""
        while head and head not in self.names:
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return self.names[head] + tail if head else name

    @property
    def dtype(self) -> str:
        """The dtype of the PyTorch module's parameters."""
        return _dtype(self.torch_module)


@dataclass(frozen=True)
class Traced:
    """Every line, and the modules that only one side calls: PyTorch's by PyTorch's names, flax's by flax's."""

    lines: list[Line]
    torch_only: tuple[str, ...]
    flax_only: tuple[str, ...]
    dtype: str


def trace_pair(pair: Pair) -> list[Line]:
    """The model and every module that both sides call, in the order of execution. Errors: as in `traced_pair`."""
    return traced_pair(pair).lines


def traced_pair(pair: Pair, dtype: str | None = None) -> Traced:
    """The lines, and the modules that were not compared.

    With a dtype, a copy of the PyTorch module in that dtype is traced.

    Errors: ValueError for a name in `names` that the PyTorch module does not have or the flax module never calls, for
    outputs with different shapes, and for parameters of a dtype without a budget; Raised if the PyTorch module raises,
    ReferenceFailure if the flax module raises.
    """
    module = pair.torch_module if dtype is None else deepcopy(pair.torch_module).to(getattr(torch, dtype))
    tested = _dtype(module)
    if tested not in UNIT_ROUNDOFF:
        raise ValueError(f"Pair: torch_module has parameters of {tested}, not one of {', '.join(UNIT_ROUNDOFF)}")
    modules = {name for name, _ in module.named_modules()}
    unknown = [name for name in pair.names if name not in modules]
    if unknown:
        raise ValueError(f"tracing.Pair: names has {unknown[0]!r}, which is not a module of the PyTorch side")
    rounded = _rounded(pair, module)
    cotangent, seen, gradients = _run(pair, module, rounded)
    reference_trace = _flax_trace(pair, module, rounded, cotangent)
    theirs = {event.module for event in reference_trace.values}
    missing = [name for name in pair.names.values() if not any(f"{m}.".startswith(f"{name}.") for m in theirs)]
    if missing:
        raise ValueError(f"tracing.Pair: names has {missing[0]!r}, which the flax side never calls")
    ours = {event.module: pair.flax_name(event.module) for event in seen.values}
    renamed = [
        {event._replace(module=ours[event.module]): x for event, x in values.items()}
        for values in (seen.values, seen.gradients)
    ]
    compared = lines(reference_trace, Found([Recording(*renamed)], gradients), whole, tested, {})
    torch_only = tuple(name for name, other in ours.items() if other not in theirs)
    return Traced(compared, torch_only, tuple(sorted(theirs - set(ours.values()))), tested)


def _flax_trace(pair: Pair, module: nn.Module, rounded: list[torch.Tensor], cotangent: np.ndarray) -> ReferenceTrace:
    """The flax side with the PyTorch module's weights, under JAX's standard type promotion."""
    jax = bridge.start()
    import jax.numpy as jnp

    def loss(model: Any) -> Any:
        arrays = [jnp.asarray(_array(x) if x.is_floating_point() else x.cpu().numpy()) for x in rounded]
        out = of_flax(model, *arrays)
        check_shape(out, cotangent.shape)
        return (out * jnp.asarray(cotangent)).sum()

    weights = {name: _array(p) for name, p in module.named_parameters()}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        make = partial(of_flax, pair.make_flax)
        return traced(make, loss, weights, _dtype(module), pair.seed, is_whole=True)


def _run(
    pair: Pair, module: nn.Module, arguments: list[torch.Tensor]
) -> tuple[np.ndarray, Recording, dict[str, np.ndarray]]:
    """The drawn cotangent, the PyTorch side's recording under its own names, and its weights' gradients.

    A gradient is zero if backward does not reach the weight, and missing if the weight requires none.
    """
    with recorded(module, is_whole=True) as seen:
        out = of_torch(module, *arguments)
        check_output(out)
        noise = np.random.default_rng(pair.seed).standard_normal(out.shape)
        cotangent = torch.from_numpy(noise).to(out)
        leaves = {name: p for name, p in module.named_parameters() if p.requires_grad}
        gradients = of_torch(_gradients, out, list(leaves.values()), cotangent)
    reached = zip(leaves.items(), gradients, strict=True)
    weight_gradients = {n: _array(torch.zeros_like(p) if g is None else g) for (n, p), g in reached}
    return _array(cotangent), seen, weight_gradients


def _gradients(out: torch.Tensor, leaves: list[nn.Parameter], cotangent: torch.Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(out, leaves, cotangent, allow_unused=True)


def _rounded(pair: Pair, module: nn.Module) -> list[torch.Tensor]:
    """The inputs for the PyTorch side: floating ones in its parameters' dtype and on their device."""
    like = next(module.parameters(), torch.zeros((), dtype=torch.float64))
    tensors = [torch.from_numpy(np.array(x)).to(like.device) for x in pair.inputs]
    return [x.to(like.dtype) if x.is_floating_point() else x for x in tensors]


def _dtype(module: nn.Module) -> str:
    return str(next((p.dtype for p in module.parameters()), torch.float64)).removeprefix("torch.")


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


def _kind(x: Any) -> str:
    return type(x).__name__
