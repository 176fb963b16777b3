"""Threads that a rank starts belong to the rank: their collectives and their errors are the rank's.

Python prints an exception that ends a thread, and goes on: a verdict without it would be of half a function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

# Of the thread that starts another: a block around the new thread's work, and a call for an exception that ends it.
Owner = tuple[Callable[[], AbstractContextManager[Any]], Callable[[BaseException], object]]


@contextmanager
def owned(owner_of_caller: Callable[[], Owner | None]) -> Iterator[None]:
    """From now on, a new thread belongs to the owner that its starter has; None: to nobody."""
    start, run = threading.Thread.start, threading.Thread.run
    owners: WeakKeyDictionary[threading.Thread, Owner] = WeakKeyDictionary()

    @wraps(start)
    def owned_start(self: threading.Thread) -> None:
        owner = owner_of_caller()
        if owner is not None:
            owners[self] = owner
        start(self)

    @wraps(run)
    def owned_run(self: threading.Thread) -> None:
        owner = owners.pop(self, None)
        if owner is None:
            run(self)
            return
        around, raised = owner
        try:
            with around():
                run(self)
        except SystemExit:  # ends a thread as it means to
            raise
        except BaseException as error:
            raised(error)

    threading.Thread.start, threading.Thread.run = owned_start, owned_run
    try:
        yield
    finally:
        threading.Thread.start, threading.Thread.run = start, run
