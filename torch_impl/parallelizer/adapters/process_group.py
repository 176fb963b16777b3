"""Destroy the default process group."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def _destroy_dist_connection() -> None:
    """Destroy the default process group, if there is one. May be called any number of times, from any thread.

    On the main thread interrupts are ignored meanwhile, and the handler is restored afterwards, even if destroying the
    group raises. Other threads cannot change signal handlers.
    """
    with _interrupts_ignored():
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT, if this thread may change its handler and Python can restore it."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if handler is None:  # another thread, or a handler that was installed from C and cannot be restored
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
