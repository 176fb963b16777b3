"""Threads that a rank starts belong to the rank: their collectives and their errors are the rank's.

Python prints an exception that ends a thread, and goes on. A verdict that ignored it would judge half a function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

# A context in which the new thread works, and a function that gets an exception which ends the thread.
Owner = tuple[Callable[[], AbstractContextManager[Any]], Callable[[BaseException], object]]


@contextmanager
def thread_owners(owner_of_caller: Callable[[], Owner | None]) -> Iterator[None]:
    """Inside the block, a new thread gets the owner of the thread that starts it, if that has one."""
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
        context, report_error = owner
        try:
            with context():
                run(self)
        except SystemExit:  # the thread means to end
            raise
        except BaseException as error:
            report_error(error)

    threading.Thread.start, threading.Thread.run = owned_start, owned_run
    try:
        yield
    finally:
        threading.Thread.start, threading.Thread.run = start, run
