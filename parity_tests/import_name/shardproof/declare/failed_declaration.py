"""Schemes with a wrong declaration, in a file imported for judging: the other schemes of the file are still judged.

In an ordinary import, as by `python my_scheme.py`, the decorator raises.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from shardproof.endings.exit_status import RANK_FAILED, USAGE
from shardproof.endings.raised import message_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Decorator = Callable[[Callable[..., Any]], Result]  # from a function to its scheme

_importing: str | None = None  # the module whose failed declarations are collected
_of_module: dict[str, list[FailedDeclaration]] = {}


@dataclass(frozen=True, eq=False)
class FailedDeclaration:
    """Stands for a failed scheme in its module.

    It can be called like the function and has no other part of a scheme.
    """

    name: str
    fn: Callable[..., Any]
    file: str
    line: int  # of the declaration
    error: str  # `scheme 'name': ...`
    status: int = USAGE

    @property
    def key(self) -> str:
        return f"{self.fn.__module__}:{self.name}"

    @property
    def sentence(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.error}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # No fields exist during unpickling.
        raise AttributeError(name if name.startswith("_") or "error" not in vars(self) else self.error)


@dataclass(frozen=True)
class FailedImport:
    """Stands for the schemes of a file after the line at which its import failed or ended the process."""

    name: str
    file: str
    line: int
    sentence: str
    status: int = RANK_FAILED

    @property
    def key(self) -> str:
        return f"import {self.file}"


@contextmanager
def collected(module: str) -> Iterator[None]:
    """While this module is imported, collect its functions' failed declarations."""
    global _importing
    before, _importing = _importing, module
    _of_module.pop(module, None)
    try:
        yield
    finally:
        _importing = before


def collects(
    enter: Callable[[Result], object],
) -> Callable[[Callable[Arguments, Decorator[Result]]], Callable[Arguments, Decorator[Result]]]:
    """Wraps `scheme(...)`: a declaration that raises is collected if its module is imported for judging.

    `enter` puts a successful one into the table. Its errors are always raised: for two schemes with one name, it is
    unknown which one is meant.
    """

    def of(scheme: Callable[Arguments, Decorator[Result]]) -> Callable[Arguments, Decorator[Result]]:
        @wraps(scheme)
        def collecting(*args: Arguments.args, **keywords: Arguments.kwargs) -> Decorator[Result]:
            try:
                declare = scheme(*args, **keywords)
            except TypeError as error:  # an unknown or a missing keyword
                if _importing is None:
                    raise
                declare = _raising(error)

            def declare_or_collect(fn: Callable[..., Any]) -> Result:
                try:
                    declared = declare(fn)
                except (ValueError, TypeError) as error:
                    if _importing is None or getattr(fn, "__module__", None) != _importing:
                        raise
                    return cast(Result, _collect(fn, error))
                enter(declared)
                return declared

            return declare_or_collect

        return collecting

    return of


def _raising(error: TypeError) -> Decorator[Any]:
    def declare(fn: Callable[..., Any]) -> Any:
        raise error

    return declare


def _collect(fn: Callable[..., Any], error: Exception) -> FailedDeclaration:
    name = getattr(fn, "__name__", "?")
    title = f"scheme '{name}': "
    file = getattr(sys.modules.get(fn.__module__), "__file__", None) or ""
    failed = FailedDeclaration(name, fn, file, _line_in(file), title + message_of(error).removeprefix(title))
    _of_module.setdefault(fn.__module__, []).append(failed)
    return failed


def of_module(module: str) -> list[FailedDeclaration]:
    return _of_module.get(module, [])


def _line_in(file: str) -> int:
    """The line of this file that is executing, innermost first."""
    frames = traceback.walk_stack(sys._getframe(1))
    return next((line for frame, line in frames if frame.f_code.co_filename == file), 0)
