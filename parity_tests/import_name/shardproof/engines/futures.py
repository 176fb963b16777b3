"""Notice waits for the futures of asynchronous work. A wait for a future waits for its work; taking a future does not.

A wait for a future that `then` or `collect_all` made is a wait for the futures that it was made from. If a
communication hook of DDP returns a future, C++ waits for it.
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

# A call of one of these methods counts as a wait; a call of `done` only if it returns True.
WAIT_METHODS = ("wait", "value", "done", "add_done_callback")

Context = Callable[[], AbstractContextManager[Any]]

_held: dict[int, tuple[Any, Callable[[], object]]] = {}  # by id: a future, and the function that notes a wait
# The future that `then` passes to the running callback. The callback may read it; this is not a wait.
_in_callback = threading.local()


def hold(future: Any, waited: Callable[[], object]) -> None:
    """Call `waited` when the caller first waits for this future, or for a future made from it."""
    _held[id(future)] = future, waited


def is_called_by_python() -> bool:
    """Whether Python called the method that calls this, by name. C++, such as DDP's reducer, waits for its futures."""
    method = sys._getframe(1)
    return method.f_back is not None and method.f_code.co_name in method.f_back.f_code.co_names


def forget() -> None:
    """Drop the futures of a run at its end."""
    _held.clear()


@contextmanager
def observed(rank_context: Callable[[], Context | None] = lambda: None) -> Iterator[None]:
    """Inside this block, a wait for a future of this process is noted as a wait for its work.

    A backend may call a callback in a thread of its own. The callback runs there in the context of `rank_context()`.
    """
    future: Any = torch._C.Future
    changed: list[tuple[Any, str, Callable[..., Any]]] = [
        *((future, name, _wait_method(getattr(future, name))) for name in WAIT_METHODS),
        (future, "then", _then_method(future.then, rank_context)),
        (torch._C, "_collect_all", _collect_function(torch._C._collect_all)),
        (dist, "_register_comm_hook", _register_function(dist._register_comm_hook)),  # pyright: ignore[reportAttributeAccessIssue]
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


def _note_wait(future: Any) -> None:
    if future is getattr(_in_callback, "future", None):
        return
    _, waited = _held.pop(id(future), (None, None))
    if waited is not None:
        waited()


def _wait_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wait(self: Any, *args: Any) -> Any:
        answer = method(self, *args)
        if answer is not False:
            _note_wait(self)
        return answer

    return wait


def _then_method(method: Callable[..., Any], rank_context: Callable[[], Context | None]) -> Callable[..., Any]:
    @wraps(method)
    def then(self: Any, callback: Callable[[Any], Any]) -> Any:
        thread, context = threading.get_ident(), rank_context() or nullcontext

        def run_callback(done: Any) -> Any:
            outer, _in_callback.future = getattr(_in_callback, "future", None), done
            try:
                with nullcontext() if threading.get_ident() == thread else context():
                    return callback(done)
            finally:
                _in_callback.future = outer

        future = method(self, run_callback)
        if id(self) in _held:
            hold(future, lambda: _note_wait(self))
        return future

    return then


def _collect_function(collect: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collect)
    def collect_all(futures: Any) -> Any:
        parts = list(futures)
        future = collect(parts)
        hold(future, lambda: [_note_wait(part) for part in parts])
        return future

    return collect_all


def _register_function(register: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(register)
    def register_hook(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
        @wraps(hook)
        def run_hook(*args: Any) -> Any:
            future = hook(*args)
            _note_wait(future)
            return future

        return register(reducer, state, run_hook)

    return register_hook
