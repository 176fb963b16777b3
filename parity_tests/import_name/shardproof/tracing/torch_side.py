"""Record a PyTorch model while it runs, by hooks on every module, which are removed afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardproof.tracing.events import IN, OUT, Event

Array = Callable[[Tensor], np.ndarray]


@dataclass
class Recording:
    """This rank's local arrays by event, in float64; `values` in order of execution."""

    values: dict[Event, np.ndarray] = field(default_factory=dict)
    gradients: dict[Event, np.ndarray] = field(default_factory=dict)


def local_array(x: Tensor) -> np.ndarray:
    """This rank's local part, in float64."""
    local: Any = x.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.double().cpu().numpy().copy()


@contextmanager
def recorded(model: nn.Module, *, is_whole: bool = False, array: Array = local_array) -> Iterator[Recording]:
    """Record all modules while the context is open; if `is_whole`, also the model itself, named "".

    If a module returns a tuple, its first tensor is recorded. `array` converts a tensor for the recording.
    """
    hooks, handles = _Hooks(Recording(), array), []
    for name, module in model.named_modules():
        if name or is_whole:
            handles.append(module.register_forward_pre_hook(hooks.entering(name), prepend=True))
            handles.append(module.register_forward_hook(hooks.leaving(name)))
    try:
        yield hooks.recording
    finally:
        for handle in handles:
            handle.remove()


class _Hooks:
    def __init__(self, recording: Recording, array: Array) -> None:
        self.recording, self._array = recording, array
        self._calls = Counter[str]()

    def entering(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
            self._calls[name] += 1
            return self._first(arguments, Event(name, IN, self._calls[name] - 1))

        return hook

    def leaving(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, returned: Any) -> Any:
            event = Event(name, OUT, self._calls[name] - 1)
            if type(returned) is tuple:
                return self._first(returned, event)
            return self._seen(returned, event) if is_floating(returned) else None

        return hook

    def _first(self, tensors: tuple[Any, ...], event: Event) -> tuple[Any, ...] | None:
        """The tuple with its first tensor watched; None, which leaves it unchanged, if there is no floating one."""
        return (self._seen(tensors[0], event), *tensors[1:]) if tensors and is_floating(tensors[0]) else None

    def _seen(self, x: Tensor, event: Event) -> Tensor:
        """A view of the tensor, so that its gradient belongs to this use alone.

        The recorded gradient is zero until backward reaches it, so that an unreached tensor is compared too.
        """
        values, gradients = self.recording.values, self.recording.gradients
        values[event] = self._array(x)
        if not x.requires_grad:
            return x
        gradients[event] = np.zeros_like(values[event])
        alias = x.view_as(x)
        alias.register_hook(lambda gradient: gradients.__setitem__(event, self._array(gradient)))
        return alias


def is_floating(x: Any) -> bool:
    """Whether x is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()
