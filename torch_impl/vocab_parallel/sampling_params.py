"""How a sampler cut the vocabulary before it drew: top-k, top-p and temperature, as values.

Every rank holds the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, Protocol, runtime_checkable

from torch_impl.vocab_parallel.arguments import check_temperature


class Limits(NamedTuple):
    """What the filter keeps at most; None is off."""

    top_k: int | None
    top_p: float | None

    @property
    def are_off(self) -> bool:
        return self.top_k is None and self.top_p is None


@runtime_checkable
class SamplingParams(Protocol):
    """What may stand where `sampling_params` does: any object with these three attributes."""

    @property
    def top_k(self) -> int | None: ...

    @property
    def top_p(self) -> float | None: ...

    @property
    def temperature(self) -> float: ...


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Top-k, top-p and temperature, in the order: temperature, top-k on the logits, top-p on what is left.

    Off are `top_k` None or below 1, `top_p` None or 1.0, and `temperature` 1.0. Any object with these three
    attributes may stand where `sampling_params` does.

    Errors: ValueError if top_p lies outside [0, 1] or temperature is not positive; TypeError if top_k is no
            integer.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        function = "vocab_parallel.TrainingSamplingParams"
        checked_limits(function, self.top_k, self.top_p)
        check_temperature(function, self.temperature)


def checked_limits(function: str, top_k: int | None, top_p: float | None) -> Limits:
    """The two limits, None where one is off."""
    if top_k is not None and (not isinstance(top_k, Integral) or isinstance(top_k, bool)):
        raise TypeError(f"{function}: top_k={top_k!r} must be an integer (None turns it off)")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"{function}: top_p={top_p} must lie in [0, 1] (1.0 turns it off)")
    return Limits(
        None if top_k is None or top_k <= 0 else int(top_k), None if top_p is None or top_p == 1 else float(top_p)
    )
