"""The public functions that a scheme calls, and a copy of the scheme's function that calls replacements.

Nothing is patched: the copy has its own globals, and so do the copies of the test's helper functions that it calls.
Production code still calls its own functions.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

PRODUCTION, TESTS = "torch_impl", "parity_tests"


@dataclass(frozen=True)
class PublicName:
    """A name that a production package exports, as `torch_impl.vocab_parallel` and `vocab_parallel_logprob`."""

    package: str
    name: str

    @property
    def value(self) -> Any:
        return getattr(importlib.import_module(self.package), self.name)

    @property
    def carries_arguments(self) -> bool:
        """Whether it is a record or an enumeration: functions take these as arguments, and they compute nothing."""
        value = self.value
        return isinstance(value, type) and (
            dataclasses.is_dataclass(value) or issubclass(value, (tuple, dict, enum.Enum))
        )


def public_names_of(fn: Callable[..., Any]) -> list[PublicName]:
    """The public names that a function refers to, itself or in helper functions of its test."""
    public = _public_names()
    public_names = dict[PublicName, None]()
    for function in functions_of(fn):
        names = _names_of(function.__code__)
        for value in _values(function).values():
            if id(value) in public:
                public_names[public[id(value)]] = None
            elif isinstance(value, ModuleType) and _is_production(value):
                attributes = [getattr(value, name, None) for name in sorted(names)]
                public_names |= {public[id(each)]: None for each in attributes if id(each) in public}
    return list(public_names)


def functions_of(fn: Callable[..., Any]) -> list[Any]:
    """A scheme's function, and the helper functions of its test that it calls."""
    visited = dict[int, Any]()
    functions: list[Any] = [fn]
    while functions:
        function = functions.pop()
        if id(function) not in visited:
            visited[id(function)] = function
            functions += [value for value in _values(function).values() if _is_helper(value, fn)]
    return list(visited.values())


def is_public(fn: Callable[..., Any]) -> bool:
    """Whether a scheme's function verifies something public, so that it can judge another implementation of it.

    The other built-in schemes verify parts that only our own code calls.
    """
    return bool(public_names_of(fn))


def rebound(fn: Callable[..., Any], replacements: Mapping[PublicName, Any]) -> FunctionType:
    """A copy of a function, and of its helper functions, with public names replaced."""
    by_id = {id(name.value): replacement for name, replacement in replacements.items()}
    copies: dict[int, FunctionType] = {}

    def substitute(value: Any) -> Any:
        if id(value) in by_id:
            return by_id[id(value)]
        if isinstance(value, ModuleType) and _is_production(value):
            by_name = _attributes(value, by_id)
            return Namespace(value.__name__, by_name) if by_name else value
        return copied(value) if _is_helper(value, fn) and set(public_names_of(value)) & set(replacements) else value

    def copied(function: Any) -> FunctionType:
        if id(function) in copies:
            return copies[id(function)]
        namespace = dict(function.__globals__)
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells or None)
        copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
        copy.__module__, copy.__qualname__, copy.__doc__ = function.__module__, function.__qualname__, function.__doc__
        copies[id(function)] = copy  # before its globals, which may refer to it
        for name in _names_of(function.__code__) & namespace.keys():
            namespace[name] = substitute(namespace[name])
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if _is_filled(old):
                cell.cell_contents = substitute(old.cell_contents)
        return copy

    return copied(fn)


class Namespace:
    """A production package with some names of another implementation."""

    def __init__(self, package: str, by_name: Mapping[str, Any]) -> None:
        self._package, self._by_name = package, dict(by_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_package", "_by_name"):  # empty during unpickling
            raise AttributeError(name)
        if name in self._by_name:
            return self._by_name[name]
        return getattr(importlib.import_module(self._package), name)


def _public_names() -> dict[int, PublicName]:
    """Every name that a loaded production package exports, by the identity of its object."""
    by_id = {}
    for package, module in list(sys.modules.items()):
        if package.count(".") == 1 and _is_production(module) and hasattr(module, "__path__"):
            for name, value in vars(module).items():
                if isinstance(value, FunctionType | type) and _home(value).startswith(f"{PRODUCTION}."):
                    by_id[id(value)] = PublicName(package, name)
    return by_id


def _attributes(module: ModuleType, by_id: Mapping[int, Any]) -> dict[str, Any]:
    return {name: by_id[id(value)] for name, value in vars(module).items() if id(value) in by_id}


def _values(function: Any) -> dict[str, Any]:
    """The values of a function's names: globals, and variables of enclosing functions."""
    names = _names_of(function.__code__)
    values = {name: value for name, value in function.__globals__.items() if name in names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return values | {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}


def _names_of(code: CodeType) -> set[str]:
    """Names of globals and attributes, including those in nested functions."""
    return {*code.co_names, *(name for inner in _inner(code) for name in _names_of(inner))}


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (each for each in code.co_consts if isinstance(each, CodeType))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_helper(value: Any, fn: Any) -> TypeGuard[FunctionType]:
    """Whether it is a plain function in the scheme's file or in the component's tests."""
    home = getattr(value, "__module__", None) or ""
    return isinstance(value, FunctionType) and (home.startswith(f"{TESTS}.") or home == fn.__module__)


def _is_production(module: Any) -> bool:
    return isinstance(module, ModuleType) and f"{module.__name__}.".startswith(f"{PRODUCTION}.")


def _home(value: Any) -> str:
    return getattr(value, "__module__", None) or ""
