"""What is made once and kept for all who ask, which is never a fake tensor.

Under FakeTensorMode, by which torch estimates memory and time, tensors hold no numbers: nothing made there is kept, and
nothing kept is handed out there. What inference asks for first serves training too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Asked = ParamSpec("Asked")
Found = TypeVar("Found")
# Tensors made while inference asks are such as training takes too, since what is kept serves both.
for_training = torch.inference_mode(False)


def makes_numbers() -> bool:
    """Whether a tensor made now holds numbers, which no fake tensor and none that is functionalized does."""
    if torch.compiler.is_compiling():  # traced as what runs later
        return True
    made = torch.empty(0)
    return type(made) is Tensor and not torch._is_functional_tensor(made)


def kept(make: Callable[Asked, Found]) -> Callable[Asked, Found]:
    """What a function gave for the last 16 arguments, all hashable."""
    fresh = for_training(make)
    known: Callable[..., Found] = lru_cache(maxsize=16)(fresh)

    @wraps(make)
    def asked(*given: Asked.args, **named: Asked.kwargs) -> Found:
        return known(*given, **named) if makes_numbers() else fresh(*given, **named)

    return asked


class KeptProperty(cached_property[Found]):
    """Derived on first use, and kept."""

    def __init__(self, derived: Callable[[Any], Found]) -> None:
        super().__init__(for_training(derived))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or makes_numbers():
            return super().__get__(instance, owner)
        return self.func(instance)


class KeptBeside:
    """What is derived from objects, as long as they live."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()

    def of(self, owner: Any, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make()` gave for this owner and key; else `make()`."""
        if not makes_numbers():
            return make()
        known = self._known.setdefault(owner, {})
        if key not in known:
            known[key] = for_training(make)()
        return known[key]
