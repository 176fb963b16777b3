"""The function objects of a user's files in this process, and the `functools` caches around them."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Collection
from types import FunctionType, ModuleType
from typing import Any

from shardproof.engines.ledger import is_plumbing

INSTALLED = ("site-packages", "dist-packages")


def live_objects(kind: type, files: Collection[str]) -> list[Any]:
    """All objects of this type that the garbage collector tracks or that these files' modules lead to."""
    found = {id(each): each for each in gc.get_objects() if type(each) is kind}
    modules = [module for module in list(sys.modules.values()) if _file(module) in files]
    names = {module.__name__ for module in modules}
    queue: list[Any] = [value for module in modules for value in list(vars(module).values())]
    seen: set[int] = set()
    while queue:
        value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is kind:
            found[id(value)] = value
        queue += _inside(value, names)
    return list(found.values())


def caches() -> list[Any]:
    """The `functools` caches of the user's functions: a cached call runs no lines, so an edit changes nothing."""
    own = {file for module in list(sys.modules.values()) if (file := _file(module)) and _is_own(file)}
    wrappers = live_objects(functools._lru_cache_wrapper, own)
    codes = ((wrapper, getattr(inspect.unwrap(wrapper), "__code__", None)) for wrapper in wrappers)
    return [wrapper for wrapper, code in codes if code is not None and _is_own(code.co_filename)]


def _file(module: ModuleType) -> str | None:
    return getattr(module, "__file__", None)


@functools.cache
def _is_own(file: str) -> bool:
    return not is_plumbing(file) and not any(place in file for place in INSTALLED)


def _inside(value: Any, modules: Collection[str]) -> list[Any]:
    """The objects that a definition refers to: methods, decorated functions, variables of the functions around it."""
    wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
    inside = [] if wrapped is None else [wrapped]
    if isinstance(value, staticmethod | classmethod):
        inside.append(value.__func__)
    elif isinstance(value, property):
        inside += [value.fget, value.fset]
    elif isinstance(value, type) and value.__module__ in modules:
        inside += vars(value).values()
    elif type(value) is FunctionType:
        inside += inspect.getclosurevars(value).nonlocals.values()
    return inside
