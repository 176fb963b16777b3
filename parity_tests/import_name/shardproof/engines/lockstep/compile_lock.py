"""torch's lock around compilation, for ranks that are threads.

A rank that compiles may wait for a collective, because the compiler waits for asynchronous tensors. If another rank
blocked at the lock, it would keep its turn and no rank could run.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardproof.engines.lockstep import world

MODULE, NAME = "torch._dynamo.convert_frame", "compile_lock"


class TurnLock:
    """A lock that passes the turn to other ranks of lockstep until it is free."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self._by_thread = threading.local()

    def __enter__(self) -> None:
        self._entries().append(self._acquire())

    def __exit__(self, *exception: object) -> None:
        if self._entries().pop():
            self.lock.release()

    def _entries(self) -> list[bool]:
        """For each open block of this thread, outermost first: whether it acquired the lock."""
        if not hasattr(self._by_thread, "entries"):
            self._by_thread.entries = []
        return self._by_thread.entries

    def _acquire(self) -> bool:
        """False if no other rank can run: the compiling rank waits for this rank, which then does without the lock."""
        rank_world = world.current()
        if rank_world is None:
            return self.lock.acquire()
        scheduler = rank_world.exchange.scheduler
        while not self.lock.acquire(blocking=False):
            if not scheduler.can_others_run(scheduler.running):
                return False
            scheduler.let_others_run(scheduler.running)
        return True


@contextmanager
def installed() -> Iterator[None]:
    """Replace the compiler's lock by a `TurnLock` at the first compilation; restore everything on leaving."""
    compile_of_torch = torch.compile

    @functools.wraps(compile_of_torch)
    def compile_in_turns(*arguments: Any, **options: Any) -> Any:
        _install()
        return compile_of_torch(*arguments, **options)

    if MODULE in sys.modules:
        _install()
    torch.compile = compile_in_turns
    try:
        yield
    finally:
        torch.compile = compile_of_torch
        module = sys.modules.get(MODULE)
        if isinstance(lock := getattr(module, NAME, None), TurnLock):
            setattr(module, NAME, lock.lock)


def _install() -> None:
    module = importlib.import_module(MODULE)
    lock = getattr(module, NAME, None)  # older versions of torch compile without a lock
    if lock is not None and not isinstance(lock, TurnLock):
        setattr(module, NAME, TurnLock(lock))
