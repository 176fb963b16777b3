"""Record a PyTorch model while it runs: hooks on every module, which are gone afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from parity_tests.tracing.events import IN, OUT, Event

Array = Callable[[Tensor], np.ndarray]


@dataclass
class Recording:
    """Arrays by event, in float64, as this rank holds them; `values` in the order of execution."""

    values: dict[Event, np.ndarray] = field(default_factory=dict)
    gradients: dict[Event, np.ndarray] = field(default_factory=dict)


def local_array(x: Tensor) -> np.ndarray:
    """What this rank holds, in float64."""
    local: Any = x.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.double().cpu().numpy().copy()


@contextmanager
def recorded(model: nn.Module, *, is_whole: bool = False, array: Array = local_array) -> Iterator[Recording]:
    """All modules, while the context is open; the model itself, whose name is "", if `is_whole`.

    Of a module that returns a tuple it is the first tensor. `array` is what is written down of a tensor.
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
        """The tuple with its first tensor seen; nothing, which leaves it alone, where that is none to see."""
        return (self._seen(tensors[0], event), *tensors[1:]) if tensors and is_floating(tensors[0]) else None

    def _seen(self, x: Tensor, event: Event) -> Tensor:
        """The same tensor under a name of its own, so that its gradient is that of this use alone; zero until there is
        one, so that what backward never comes to is compared as well."""
        values, gradients = self.recording.values, self.recording.gradients
        values[event] = self._array(x)
        if not x.requires_grad:
            return x
        gradients[event] = np.zeros_like(values[event])
        alias = x.view_as(x)
        alias.register_hook(lambda gradient: gradients.__setitem__(event, self._array(gradient)))
        return alias


def is_floating(x: Any) -> bool:
    """Whether x is a tensor of floating numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()
