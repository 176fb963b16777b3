"""Ctrl-C that is not lost where Python can only report an exception and go on.

An exception out of a function in `gc.callbacks` (JAX and Hypothesis have one each), a `__del__` or a weak reference's
callback goes to `sys.unraisablehook`, and what ran goes on, KeyboardInterrupt or not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """A KeyboardInterrupt that was dropped is raised again at the main thread's next call or return.

    If that is in a callback too, it is dropped and raised once more, until it reaches what ran.
    """
    others = sys.unraisablehook

    def hook(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            sys.setprofile(again)
        else:
            others(lost)

    def again(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code is not hook.__code__:  # out of the hook it would be dropped for good
            raise KeyboardInterrupt  # Python takes the profiler away that raises

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = others
