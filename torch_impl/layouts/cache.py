"""What is derived from a layout is computed once: as long as the layout lives, and never from fake tensors.

Nothing is found again by the tensors that it was built from: build a TokenLayout once for a batch, and every layer
shares what is derived from it. Rebuilt in each of four attention layers, layout and block schedule took 1.7 ms a layer
of 3.5 ms for 8 sequences of 64 tokens, and no time that could be measured for 32 of 256 (one CPU core).

Under FakeTensorMode, by which torch estimates memory and time, tensors have no numbers: nothing computed there is
cached, and nothing cached is returned there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
# Outside of inference mode, so that what inference computes first serves training, too.
for_training = torch.inference_mode(False)


def has_numbers() -> bool:
    """Whether a tensor created now has numbers, which no fake tensor and no functionalized one has."""
    if torch.compiler.is_compiling():  # traced as what runs later
        return True
    probe = torch.empty(0)
    return type(probe) is Tensor and not torch._is_functional_tensor(probe)


def cached(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """The function with its last 16 results, by arguments that are all hashable."""
    uncached = for_training(function)
    by_arguments: Callable[..., Value] = lru_cache(maxsize=16)(uncached)

    @wraps(function)
    def entry(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return by_arguments(*args, **kwargs) if has_numbers() else uncached(*args, **kwargs)

    return entry


def cached_tensor(function: Callable[[Any], Value]) -> property:
    """A property of a TokenLayout that is computed on first use."""

    @wraps(function)
    def entry(layout: Any) -> Value:
        return layout.derived(function.__name__, lambda: function(layout))

    return property(entry)
