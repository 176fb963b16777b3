"""The mark of tests that `make test` leaves out and `make test-all` runs: all but some values of a parameter.

`@pytest.mark.slow` marks a test, `@pytest.mark.fast_values(n)` all but `n` values of it. A test of more than a
second is slow, and one of each kind is left. docs/tiers.md counts the bugs that this misses.
"""

from __future__ import annotations

import itertools
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


def mark_other_values(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all but `n` of the values of a test with `@pytest.mark.fast_values(n)`, evenly spread."""
    left = [item for item in items if item.get_closest_marker("fast_values") and not item.get_closest_marker("slow")]
    for _, group in itertools.groupby(left, key=lambda item: item.nodeid.partition("[")[0]):
        values = list(group)
        (count,) = values[0].get_closest_marker("fast_values").args
        kept = {number * len(values) // count for number in range(count)}
        for number, item in enumerate(values):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def _marked(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
