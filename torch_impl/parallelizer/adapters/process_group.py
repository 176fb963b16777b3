"""The end of the default process group."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def _destroy_dist_connection() -> None:
    """Destroy the default process group, if there is one. May be called any number of times, from any thread.

    On the main thread an interrupt is ignored meanwhile, and whoever handled interrupts before does so afterwards,
    also where the destruction raises. Other threads have no signals to change.
    """
    with _interrupts_ignored():
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """SIGINT ignored, where this thread may say so and Python knows whom to put back."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if before is None:  # another thread, or a handler that was installed from C and cannot be put back
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
