"""Record a PyTorch model while it runs: hooks on every module, which are gone afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from parity_tests.tracing.events import IN, OUT, Event


@dataclass
class Recording:
    """Arrays by event, in float64, as this rank holds them; `values` in the order of execution."""

    values: dict[Event, np.ndarray] = field(default_factory=dict)
    gradients: dict[Event, np.ndarray] = field(default_factory=dict)


@contextmanager
def recorded(model: nn.Module, *, is_whole: bool = False) -> Iterator[Recording]:
    """All modules, while the context is open; the model itself, whose name is "", if `is_whole`."""
    recording, calls, handles = Recording(), Counter[str](), []
    for name, module in model.named_modules():
        if name or is_whole:
            handles.append(module.register_forward_pre_hook(_entering(name, recording, calls), prepend=True))
            handles.append(module.register_forward_hook(_leaving(name, recording, calls)))
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def _entering(name: str, recording: Recording, calls: Counter[str]) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        calls[name] += 1
        if not arguments or not _is_floating(arguments[0]):
            return None
        return (_seen(arguments[0], Event(name, IN, calls[name] - 1), recording), *arguments[1:])

    return hook


def _leaving(name: str, recording: Recording, calls: Counter[str]) -> Any:
    def hook(module: nn.Module, arguments: Any, returned: Any) -> Any:
        return _seen(returned, Event(name, OUT, calls[name] - 1), recording) if _is_floating(returned) else None

    return hook


def _seen(x: Tensor, event: Event, recording: Recording) -> Tensor:
    """The same tensor under a name of its own, so that its gradient is that of this use alone; zero until there is one,
    so that what backward never comes to is compared as well."""
    recording.values[event] = _array(x)
    if not x.requires_grad:
        return x
    recording.gradients[event] = np.zeros_like(recording.values[event])
    alias = x.view_as(x)
    alias.register_hook(lambda gradient: recording.gradients.__setitem__(event, _array(gradient)))
    return alias


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _array(x: Tensor) -> np.ndarray:
    local: Any = x.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.double().cpu().numpy().copy()
