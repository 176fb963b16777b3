"""The tensors that a function keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

NOTHING_SAVED = 0, "inference_only=True saved nothing for backward; call with inference_only=False"


def saved_by(function: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """The function's result, and the tensors that it saves."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        return function(), saved


def saved_beside(inputs: tuple[Tensor, ...], function: Callable[[], Any]) -> tuple[int, int]:
    """How many saved tensors are the inputs themselves, and the bytes of all others."""
    own = {x.data_ptr() for x in inputs}
    _, saved = saved_by(function)
    extra = [x for x in saved if x.data_ptr() not in own]
    return len(saved) - len(extra), sum(x.nbytes for x in extra)


def saved_in_inference(function: Callable[[], Tensor]) -> tuple[int, str]:
    """How many tensors are saved, and the error of a backward: `NOTHING_SAVED`."""
    y, saved = saved_by(function)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    return len(saved), str(caught.value)
