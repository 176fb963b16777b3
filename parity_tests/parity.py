"""The parity test of a file with several schemes: drawn cases of each on each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from shardproof import check_cases


def parity(schemes: Iterable[Any], **examples: int | None) -> Callable[..., None]:
    """A test of one item for each scheme and each engine that is given a number of cases.

        test_parity = parity(SCHEMES, lockstep=20, gloo=4)

    None is the number of the active profile. With a single engine, items are named by the scheme alone.
    """
    schemes = list(schemes)
    if not (schemes and examples):
        raise ValueError("parity: pass schemes, and engines with their numbers of cases; pytest skips an empty test")
    each_scheme = pytest.mark.parametrize("declared", schemes, ids=lambda declared: declared.name)
    if len(examples) == 1:
        ((engine, count),) = examples.items()

        @each_scheme
        def test(declared: Any) -> None:
            check_cases(declared, count, engine=engine)

        return test

    @pytest.mark.parametrize("engine", list(examples))
    @each_scheme
    def test_on_engines(declared: Any, engine: str) -> None:
        check_cases(declared, examples[engine], engine=engine)

    return test_on_engines
