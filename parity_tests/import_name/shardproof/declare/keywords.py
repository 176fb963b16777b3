"""Unknown keywords are rejected with the nearest known one: `output=` with `did you mean outputs=?`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def nearest_keyword(word: str, keywords: Sequence[str]) -> str:
    """`; did you mean that=?` if there is a similar keyword, else an empty string.

    >>> nearest_keyword("output", ["inputs", "outputs"])
    '; did you mean outputs=?'
    """
    matches = difflib.get_close_matches(word, keywords, n=1)
    return f"; did you mean {matches[0]}=?" if matches else ""


def rejects_unknown_keywords(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, with a TypeError for unknown keywords that names the nearest one, or all if none is similar."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for name in kwargs:
            if name not in parameters:
                free = [keyword for keyword in parameters if keyword not in kwargs]
                hint = nearest_keyword(name, free) or f"; it has {', '.join(parameters)}"
                raise TypeError(f"{function.__name__} has no keyword {name!r}{hint}")
        return function(*args, **kwargs)

    return checked
