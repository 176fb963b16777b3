"""A scheme of what is rejected: calls, each with words that its message has, which are tried on every rank.

`declared` is what such a scheme states, `codes` what it returns. The reference is that every call is rejected so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parity_tests.harness.declare.draws import token_below

Call = tuple[Callable[[], Any], str]
COLUMNS = 4


def declared(axis: str, sizes: tuple[int, ...], count: int) -> dict[str, Any]:
    """Keywords of `scheme` for so many calls over an axis: each rank fills in its own columns."""
    return {
        "reference": all_rejected,
        "mesh": {axis: sizes},
        "inputs": {"ids": f"k r/{axis}"},
        "outputs": f"k r/{axis}",
        "dims": {"k": (count,), "r": (COLUMNS,)},
        "draw": {"ids": token_below("r")},
    }


def all_rejected(ids: Any) -> Any:
    """1 for each call."""
    return 0 * ids + 1


def codes(ids: Tensor, calls: Sequence[Call]) -> Tensor:
    """1 where a call is rejected with its words, 0 where it is not."""
    verdicts = [[int(words in message_of(call))] for call, words in calls]
    return torch.tensor(verdicts, dtype=ids.dtype, device=ids.device).expand_as(ids)


def message_of(call: Callable[[], Any]) -> str:
    """The name of the error that a call raises, and its message; empty where it raises none."""
    try:
        call()
    except Exception as error:  # another error has other words
        return f"{type(error).__name__}: {error}"
    return ""
