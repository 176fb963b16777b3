"""Futures of asynchronous work: whoever waits for a future waits for its work; taking the future is no wait.

A future that follows from another by `then` or `collect_all` stands for it. A future that a communication hook of DDP
returns is waited for in C++.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

# Methods after which the caller knows that the future is complete; `done` only if it answers True.
WAITING = ("wait", "value", "done", "add_done_callback")
FOLLOWING = "then"

Context = Callable[[], AbstractContextManager[Any]]

_held: dict[int, tuple[Any, Callable[[], object]]] = {}  # by id: a future and the note that it was waited for
# The complete future that a callback of `then` has as its argument: the callback's reading is not the caller's wait.
_in_callback = threading.local()


def hold(future: Any, waited: Callable[[], object]) -> None:
    """Call `waited` once the caller waits for this future, or for one that follows from it."""
    _held[id(future)] = future, waited


def is_called_by_python() -> bool:
    """Whether the method that asks was called by its name in Python. C++, as DDP's reducer, waits for its futures."""
    method = sys._getframe(1)
    return method.f_back is not None and method.f_code.co_name in method.f_back.f_code.co_names


def forget() -> None:
    """At the end of a run: drop its futures."""
    _held.clear()


@contextmanager
def observed(recording: Callable[[], Context | None] = lambda: None) -> Iterator[None]:
    """In this block, futures of this process note who waits for them.

    A backend may call a callback in a thread of its own: there it runs in the context that `recording` gives the rank.
    """
    future: Any = torch._C.Future
    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        *((future, name, _waiting(getattr(future, name))) for name in WAITING),
        (future, FOLLOWING, _following(getattr(future, FOLLOWING), recording)),
        (torch._C, "_collect_all", _collecting(torch._C._collect_all)),
        (dist, "_register_comm_hook", _with_hook(dist._register_comm_hook)),  # pyright: ignore[reportAttributeAccessIssue]
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    try:
        for owner, name, call in changed:
            setattr(owner, name, call)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        forget()


def _waited(future: Any) -> None:
    if future is getattr(_in_callback, "future", None):
        return
    _, waited = _held.pop(id(future), (None, None))
    if waited is not None:
        waited()


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def waiting(self: Any, *args: Any) -> Any:
        answer = method(self, *args)
        if answer is not False:
            _waited(self)
        return answer

    return waiting


def _following(method: Callable[..., Any], recording: Callable[[], Context | None]) -> Callable[..., Any]:
    @wraps(method)
    def then(self: Any, callback: Callable[[Any], Any]) -> Any:
        thread, context = threading.get_ident(), recording() or nullcontext

        def called(of: Any) -> Any:
            outer, _in_callback.future = getattr(_in_callback, "future", None), of
            try:
                with nullcontext() if threading.get_ident() == thread else context():
                    return callback(of)
            finally:
                _in_callback.future = outer

        future = method(self, called)
        if id(self) in _held:
            hold(future, lambda: _waited(self))
        return future

    return then


def _collecting(collect: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collect)
    def collected(futures: Any) -> Any:
        parts = list(futures)
        future = collect(parts)
        hold(future, lambda: [_waited(part) for part in parts])
        return future

    return collected


def _with_hook(register: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(register)
    def registered(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
        @wraps(hook)
        def returning(*args: Any) -> Any:
            future = hook(*args)
            _waited(future)
            return future

        return register(reducer, state, returning)

    return registered
