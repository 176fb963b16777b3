"""The mark of tests that `make test` leaves out and `make test-all` runs: all but some values of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")


def slow_unless(is_kept: Callable[[Value], bool], values: Iterable[Value]) -> list[Any]:
    """Values for `parametrize`, each marked as slow that `make test` does not keep; a tuple is of several names."""
    return [value if is_kept(value) else _marked(value) for value in values]


def slow_but(kept: Iterable[Value], values: Iterable[Value]) -> list[Any]:
    """Values for `parametrize`, marked as slow all but these, which are among them."""
    kept, values = list(kept), list(values)
    for value in kept:
        if value not in values:
            raise ValueError(f"slow_but: {value!r} is kept and is not among the values")
    return slow_unless(kept.__contains__, values)


def every(step: int, values: Iterable[Value]) -> list[Any]:
    """Values for `parametrize`, marked as slow all but one of so many."""
    return [value if number % step == 0 else _marked(value) for number, value in enumerate(values)]


def _marked(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
