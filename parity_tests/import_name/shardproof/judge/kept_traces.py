"""The traced programs of references, kept until a reference changes.

A notebook's cell, or a reload of a file, can change a function or a number that the reference reads, though the
reference stays the same object. A program traced before that would still compute with the old one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from shardproof.declare import travel
from shardproof.endings.raised import pass_interrupt
from shardproof.engines.lockstep.rank_globals import imported_by

MAX_PROGRAMS = 250
Programs = dict[Any, Any]  # by signature

_programs: WeakKeyDictionary[Any, Programs] = WeakKeyDictionary()
_states: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
REPEATED: WeakSet[Any] = WeakSet()  # references that gave the same numbers when they were traced again


def programs_of(reference: Callable[..., Any]) -> Programs:
    """The programs of a reference; schemes with the same reference share them."""
    return _programs.setdefault(reference, {})


def forget(reference: Callable[..., Any]) -> None:
    """Drop the programs of a reference: it is traced again."""
    _programs.pop(reference, None)


def forget_if_changed(reference: Callable[..., Any]) -> None:
    """Drop the programs of a reference if it, or anything that it uses, has changed since the last call."""
    state = _state(reference)
    before = _states.get(reference)
    if state is None or state != before:
        forget(reference)
        REPEATED.discard(reference)
        if state is not None and before is not None:
            import jax

            jax.clear_caches()  # JAX, too, finds traces of the functions that the reference calls by their identity
    _states[reference] = state


def make_room() -> None:
    """Drop all programs once there are MAX_PROGRAMS, and JAX's caches of their traces.

    A compiled program takes some 80 memory maps and 10 MB. Linux allows a process 65,530 maps; XLA crashes with a
    segmentation fault if it gets no more.
    """
    if sum(map(len, _programs.values())) >= MAX_PROGRAMS:
        import jax

        _programs.clear()
        jax.clear_caches()


def _state(reference: Callable[..., Any]) -> str | None:
    """A digest of the function with the user's functions and values that it uses; None if one cannot be pickled."""
    try:
        names = {"__main__", getattr(_unwrapped(reference), "__module__", None)}
        for home in [sys.modules.get(name) for name in names if name is not None]:
            for value in [] if home is None else list(vars(home).values()):
                names.add(value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None))
        modules = set().union(*(imported_by(name) for name in names if isinstance(name, str)))
        return hashlib.sha256(travel.state_of(reference, modules)).hexdigest()
    except BaseException as error:
        pass_interrupt(error)
        return None


def _unwrapped(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside of partials, which have no module of their own."""
    while isinstance(reference, partial):
        reference = reference.func
    return reference
