"""Results that depend on a scheme alone, kept as long as the scheme."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from shardproof.declare.declared import Declared

Result = TypeVar("Result")


def once_for_scheme(function: Callable[[Declared], Result]) -> Callable[[Declared], Result]:
    """The function, called once for each scheme; nobody may change its result."""
    results: WeakKeyDictionary[Declared, Result] = WeakKeyDictionary()

    @wraps(function)
    def once(scheme: Declared) -> Result:
        if scheme not in results:
            results[scheme] = function(scheme)
        return results[scheme]

    return once
