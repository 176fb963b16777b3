"""Trace a single-device PyTorch module, and how far rounding moves each tensor: the reference for a sharded one.

It runs in float64 on weights and inputs rounded to the tested dtype. In the copies every weight and every tensor that
leaves a module has a rounding error of that dtype, as on the flax side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardproof.judge.reference import UNIT_ROUNDOFF
from shardproof.tracing.events import LOSS, NORM, Event
from shardproof.tracing.flax_side import COPIES, ReferenceTrace, parted
from shardproof.tracing.probes import draws, is_summed_in
from shardproof.tracing.torch_side import Recording, is_floating, local_array, recorded

ForwardFunction = Callable[[nn.Module], Tensor]  # from the module to the tensor that backward starts from
Cotangent = Callable[[tuple[int, ...]], Tensor]  # by that tensor's shape


@dataclass(frozen=True)
class TwinTrace:
    """The reference's arrays by event and by weight, the weights, and the shape of the output."""

    reference: ReferenceTrace
    weights: dict[str, np.ndarray]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Copy:
    seen: Recording
    of_weights: dict[str, np.ndarray]
    out: np.ndarray


def traced(module: nn.Module, call: ForwardFunction, cotangent: Cotangent, dtype: str, seed: int = 0) -> TwinTrace:
    """One forward and backward; `module` is changed to float64.

    A weight that gets no gradient has a gradient of zero.
    """
    weights = {name: p.detach().to(getattr(torch, dtype)).double() for name, p in module.named_parameters()}
    module.double()
    generator = np.random.default_rng(seed)
    copies = []
    for unit in [0.0] + [UNIT_ROUNDOFF[dtype]] * COPIES:
        rounding = _Rounding(dtype, unit, generator)
        for name, parameter in module.named_parameters():
            parameter.data = rounding.of_weight(weights[name])
        copies.append(_one(module, call, cotangent, rounding))
    arrays = {name: x.numpy() for name, x in weights.items()}
    return TwinTrace(_reference_trace(copies), arrays, copies[0].out.shape)


def _one(module: nn.Module, call: ForwardFunction, cotangent: Cotangent, rounding: _Rounding) -> _Copy:
    module.zero_grad()
    with rounding.around(module), recorded(module, is_whole=True) as seen, rounding.before(module):
        out = call(module)
        out.backward(cotangent(tuple(out.shape)))
    gradients = {
        name: local_array(torch.zeros_like(p) if p.grad is None else p.grad) for name, p in module.named_parameters()
    }
    return _Copy(seen, gradients, local_array(out))


def _reference_trace(copies: list[_Copy]) -> ReferenceTrace:
    """The first copy's arrays, and the distance of the others.

    A tensor that no gradient reaches has a zero gradient.
    """
    exact = copies[0]
    spread: dict[tuple[str, Event | str], float] = {
        ("weight", name): parted(np.stack([each.of_weights[name] for each in copies])) for name in exact.of_weights
    }
    for event in exact.seen.values:
        spread["value", event] = parted(np.stack([each.seen.values[event] for each in copies]))
        has_gradient = event in exact.seen.gradients
        spread["gradient", event] = (
            parted(np.stack([each.seen.gradients[event] for each in copies])) if has_gradient else 0.0
        )
    totals = np.stack([each.out.sum() for each in copies])
    numbers = {LOSS: totals[0], NORM: np.zeros(())}
    spread |= {("number", LOSS): parted(totals), ("number", NORM): 0.0}
    gradients = {event: exact.seen.gradients.get(event, np.zeros_like(x)) for event, x in exact.seen.values.items()}
    return ReferenceTrace(exact.seen.values, gradients, exact.of_weights, numbers, spread)


class _Rounding:
    """The rounding errors of one copy; `unit` is 0 for the exact copy."""

    def __init__(self, dtype: str, unit: float, generator: np.random.Generator) -> None:
        self._dtype, self._unit, self._generator = dtype, unit, generator
        self._is_summed = is_summed_in(dtype)

    def of_weight(self, x: Tensor) -> Tensor:
        """The weight with an error for its products, if the dtype rounds those."""
        return self.of(x) if self._is_summed else x.clone()

    def of(self, x: Tensor) -> Tensor:
        if not self._unit:
            return x.clone()
        seed = int(self._generator.integers(2**31))
        errors = torch.from_numpy(np.asarray(draws(self._dtype, tuple(x.shape), seed)))
        if not self._is_summed:  # units of the last place of x
            errors = errors / (2.0 * torch.frexp(x.detach()).mantissa.abs()).clamp(min=1.0)
        return x * (1.0 + self._unit * errors)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Round every module's output; a recorder that is registered later sees the rounded output."""
        with _hooks(each.register_forward_hook(self._leaving) for each in module.modules()):
            yield

    @contextmanager
    def before(self, module: nn.Module) -> Iterator[None]:
        """In a narrow dtype, also round every module's input, because it was stored."""
        modules = [] if self._is_summed else list(module.modules())
        with _hooks(each.register_forward_pre_hook(self._entering, prepend=True) for each in modules):
            yield

    def _entering(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        return (self.of(arguments[0]), *arguments[1:]) if arguments and is_floating(arguments[0]) else None

    def _leaving(self, module: nn.Module, arguments: Any, returned: Any) -> Any:
        if is_floating(returned):
            return self.of(returned)
        if type(returned) is tuple and returned and is_floating(returned[0]):
            return (self.of(returned[0]), *returned[1:])
        return None


@contextmanager
def _hooks(handles: Any) -> Iterator[None]:
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()
