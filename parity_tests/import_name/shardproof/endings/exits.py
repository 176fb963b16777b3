"""A user's code that ends or replaces the process of a command: `os._exit`, `os.execv`, `os.execve`.

The command would end without a verdict, with a status that is not its own. On the main thread and on a rank of lockstep
the call raises SystemExit instead, which is a failure of the code that called it. On any other thread nothing could be
told to the command: the line of the call is noted for the parent process, and the process ends; without a parent, its
status is 3 and the line is printed. A forked process ends as it asked.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

RANK_THREAD = "lockstep-rank-"  # the names of lockstep's threads begin with it
ENDING = ("_exit", "execv", "execve")
leave = os._exit  # the process's own, before anything is installed
_process = 0  # the last one in which the calls were installed


def install(note: Callable[[str], object], *, raises: bool = True) -> None:
    """From now on, calls in this process raise or, unless `raises`, are noted as `os._exit(0) at file:line`."""
    global _process
    _process = process = os.getpid()
    for name in ENDING:
        setattr(os, name, _raising_or_noted(name, getattr(os, name), process, note, raises))


def are_installed() -> bool:
    """Whether `os._exit` is one of these calls already."""
    return os._exit is not leave and hasattr(os._exit, "__wrapped__")


def is_forked() -> bool:
    """Whether a user's code has forked this process from a command, whose verdict and output are not its own."""
    return _process not in (0, os.getpid())


def install_alone() -> None:
    """From now on, calls raise, in a process that no parent of ours waits for."""
    install(_end_without_verdict)


@contextmanager
def raised() -> Iterator[None]:
    """Inside this block, the calls raise. It needs no command: a script, a notebook or a test may verify a scheme."""
    before = {name: getattr(os, name) for name in ENDING}
    install((lambda text: None) if are_installed() else _end_without_verdict)
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(os, name, call)


def _raising_or_noted(
    name: str, end: Callable[..., Any], process: int, note: Callable[[str], object], raises: bool
) -> Callable[..., Any]:
    @wraps(end)
    def ending(*arguments: Any) -> Any:
        if os.getpid() == process:
            call = f"os.{name}({repr(arguments[0]) if arguments else ''})"
            thread = threading.current_thread()
            if raises and thread.name.startswith(RANK_THREAD):
                raise SystemExit(f"{call}, which ends a rank's process")
            if raises and thread is threading.main_thread():
                raise SystemExit(f"{call}, which ends the process of the command")
            note(f"{call}{_users_line()}")
        return end(*arguments)

    return ending


def _end_without_verdict(call: str) -> None:
    """End with a status of ours, not with the user's, which may be 0."""
    from shardproof.endings.exit_status import RANK_FAILED  # here: it needs this module

    with contextlib.suppress(OSError):
        os.write(2, f"shardproof: {call} ends this process without a verdict\n".encode(errors="backslashreplace"))
    leave(RANK_FAILED)


def _users_line() -> str:
    """` at file:line` of the call in the user's code, in this thread."""
    from shardproof.engines.ledger import innermost  # here: engines are above endings

    frames, frame = [], sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    at = innermost(frames[::-1])
    return f" at {at}" if at else ""
