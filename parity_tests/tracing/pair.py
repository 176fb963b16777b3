"""A PyTorch module and a flax module that should compute the same, and where they first do not.

    from parity_tests.tracing import Pair, trace_pair

    for line in trace_pair(Pair(torch_module, make_flax, (x,), names={"fc1": "dense_in"})):
        print(line)

The loss is the sum of the output times drawn numbers, so that every part of the output has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from parity_tests.tracing.events import Event
from parity_tests.tracing.flax_side import traced
from parity_tests.tracing.lines import Found, Line, lines
from parity_tests.tracing.torch_side import Recording, recorded


@dataclass(frozen=True)
class Pair:
    """`make_flax(weights)` is the flax module with the weights of the PyTorch one, by PyTorch's names.

    Floating inputs are given to PyTorch in its parameters' dtype and to flax in float64. `names` maps a PyTorch
    module's name to the flax one's, where they differ; a name given for a parent holds for what is below it.
    """

    torch_module: nn.Module
    make_flax: Callable[[Mapping[str, Any]], Any]
    inputs: tuple[np.ndarray, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def flax_name(self, name: str) -> str:
        """The name of a module on the other side: that of the longest named parent, and the rest as it is."""
        head, tail = name, ""
        while head and head not in self.names:
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return self.names[head] + tail if head else name


def trace_pair(pair: Pair) -> list[Line]:
    """Every module that both sides call, in the order of execution.

    Errors: ValueError for a name in `names` that the PyTorch module lacks, or that the flax one never calls.
    """
    modules = {name for name, _ in pair.torch_module.named_modules()}
    unknown = [name for name in pair.names if name not in modules]
    if unknown:
        raise ValueError(f"tracing.Pair: names has {unknown[0]!r}, which is no module of the PyTorch side")
    dtype = next((p.dtype for p in pair.torch_module.parameters()), torch.float64)
    weights = {name: p.detach().double().numpy() for name, p in pair.torch_module.named_parameters()}
    rounded = [torch.from_numpy(np.array(x)) for x in pair.inputs]
    rounded = [x.to(dtype) if x.is_floating_point() else x for x in rounded]
    cotangent, found = _run(pair, rounded)

    def loss(model: Any) -> Any:
        import jax.numpy as jnp

        given = [jnp.asarray(x.double().numpy() if x.is_floating_point() else x.numpy()) for x in rounded]
        return (model(*given) * jnp.asarray(cotangent)).sum()

    known = traced(pair.make_flax, loss, weights, str(dtype).removeprefix("torch."), pair.seed)
    called = {event.module for event in known.values}
    missing = [name for name in pair.names.values() if not any(f"{m}.".startswith(f"{name}.") for m in called)]
    if missing:
        raise ValueError(f"tracing.Pair: names has {missing[0]!r}, which the flax side never calls")
    return lines(known, found, _whole, str(dtype).removeprefix("torch."), {})


def _run(pair: Pair, given: list[torch.Tensor]) -> tuple[np.ndarray, Found]:
    """The drawn cotangent, and what the PyTorch side recorded under the names of the other."""
    module = pair.torch_module
    with recorded(module) as seen:
        out = module(*given)
        cotangent = torch.from_numpy(np.random.default_rng(pair.seed).standard_normal(out.shape)).to(out.dtype)
        leaves = dict(module.named_parameters())
        gradients = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True)

    def renamed(arrays: dict[Event, np.ndarray]) -> dict[Event, np.ndarray]:
        return {event._replace(module=pair.flax_name(event.module)): x for event, x in arrays.items()}

    of_weights = {n: g.double().numpy() for n, g in zip(leaves, gradients, strict=True) if g is not None}
    return cotangent.double().numpy(), Found([Recording(renamed(seen.values), renamed(seen.gradients))], of_weights)


def _whole(rank: int, event: Event, whole: tuple[int, ...], local: tuple[int, ...]) -> list[np.ndarray] | None:
    return [np.arange(size) for size in whole] if whole == local else None
