"""A user's code that ends or replaces the process of a command: `os._exit`, `os.execv`, `os.execve`.

The command would end without a verdict, with a status that is not its own. On the main thread and on a rank of lockstep
the call raises SystemExit instead, which is a failure of the code that called it. On any other thread nothing could be
told to the command: the line of the call is noted for the parent process, and the process ends; without a parent, its
status is 3 and the line is printed. A forked process ends as it asked.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

RANK_THREAD = "lockstep-rank-"  # the names of lockstep's threads begin with it
ENDING = ("_exit", "execv", "execve")
STACKS = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else 0  # a process of ours writes its stacks at this signal
leave = os._exit  # the process's own, before anything is installed
_process = 0  # the last one in which the calls were installed
interrupt_is_told = False  # whether the sentence on an interrupt has been printed
ASKING = (signal.SIGTERM, signal.SIGHUP)  # ask a command to end; Python raises at SIGINT by itself
asked: int | None = None  # the one of them that has come
TWICE_S = 2.0  # within it, a second interrupt is the first one, which was sent to a group and passed on by a parent
_interrupted_s = -math.inf  # when the last one came


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `SIGRTMIN+6`: most real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def install(note: Callable[[str], object], *, raises: bool = True) -> None:
    """From now on, calls in this process raise or, unless `raises`, are noted as `os._exit(0) at file:line`."""
    global _process
    _process = process = os.getpid()
    for name in ENDING:
        setattr(os, name, _raising_or_noted(name, getattr(os, name), process, note, raises))


def are_installed() -> bool:
    """Whether `os._exit` is one of these calls already."""
    return os._exit is not leave and hasattr(os._exit, "__wrapped__")


def raise_when_asked() -> None:
    """From now on, a signal that asks to end raises KeyboardInterrupt here, so that the verdicts so far are printed."""
    for number in ASKING:
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, _raise)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def end_when_asked() -> None:
    """Again, such a signal ends the process at once, as a process that a user's code has forked."""
    for number in raising():
        signal.signal(number, signal.SIG_DFL)


def raising() -> list[int]:
    """The signals that raise here by `raise_when_asked`."""
    return [number for number in ASKING if signal.getsignal(number) is _raise]


def _raise(number: int, _: object) -> NoReturn:
    global asked
    asked = number
    for other in ASKING:  # a second one comes where the first was sent to a whole group
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupt(*_: object) -> None:
    global _interrupted_s
    before, _interrupted_s = _interrupted_s, time.monotonic()
    if _interrupted_s - before > TWICE_S:
        raise KeyboardInterrupt


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
