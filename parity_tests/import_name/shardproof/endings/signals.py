"""The signals that end a command from outside: they raise in it, so that the verdicts so far are printed."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import NoReturn

STACKS = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else 0  # a process of ours writes its stacks at this signal
# Ask a command to end; Python raises at SIGINT by itself. Batch systems send the last four before a job's end.
ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM)
RAISED_S = 1.1  # by which the system has raised a limit of time when its signal comes; clocks of processes are coarse
TOLD_S = 0.5  # within it, a parent has noted a signal that was sent to a whole group
TWICE_S = 2.0  # within it, a second interrupt is the first one, which was sent to a group and passed on by a parent
asked: int | None = None  # the signal of `ASKING` that has come
_parent_is_asked: Callable[[], bool] | None = None  # whether the parent has received a signal; None without a parent
interrupt_is_told = False  # whether the sentence on an interrupt has been printed
_interrupted_s = -math.inf  # when the last interrupt came


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `SIGRTMIN+6`: most real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def raise_when_asked(parent_is_asked: Callable[[], bool]) -> None:
    """From now on, a signal that asks to end raises KeyboardInterrupt here, so that the verdicts so far are printed.

    A signal that the parent has not received comes from a user's code, as by `signal.alarm` or
    `_thread.interrupt_main`: it ends this process, and the scheme that runs has died.
    """
    global _parent_is_asked
    _parent_is_asked = parent_is_asked
    for number in ASKING:
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(number, _raise)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def ignore_asking() -> None:
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)


def end_when_asked() -> None:
    """Again, such a signal ends the process at once, as a process that a user's code has forked."""
    for number in raising():
        signal.signal(number, signal.SIG_DFL)


def raising() -> list[int]:
    """The signals that raise here by `raise_when_asked`."""
    return [number for number in ASKING if signal.getsignal(number) is _raise]


def _raise(number: int, _: object) -> NoReturn:
    global asked
    if asked is None and not is_of_a_limit(number, resource.RUSAGE_SELF) and not _parent_is_told():
        _end_by(number)
    asked = number
    ignore_asking()  # a second one comes where the first was sent to a whole group
    raise KeyboardInterrupt


def is_of_a_limit(number: int, processes: int) -> bool:
    """Whether the system has sent a signal because processes have used up their time, as of `ulimit -t`.

    It sends SIGXCPU to the process that computes, and not to its parent, and then raises the limit by a second.
    `processes` are RUSAGE_SELF or RUSAGE_CHILDREN.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_CPU)
    used = resource.getrusage(processes)
    return number == signal.SIGXCPU and resource.RLIM_INFINITY != soft <= used.ru_utime + used.ru_stime + RAISED_S


def is_interrupted() -> bool:
    """Whether a KeyboardInterrupt comes from a signal; else a user's code has raised it, as any other exception.

    Without a parent, nobody can tell, and it is the user's.
    """
    if _parent_is_asked is None or asked is not None or _interrupted_s > -math.inf:
        return True
    return signal.getsignal(signal.SIGINT) is not _interrupt and _parent_is_told()


def _parent_is_told() -> bool:
    """Whether the parent has received a signal too. It may need a moment after a signal to the whole group."""
    deadline = time.monotonic() + TOLD_S
    while _parent_is_asked is not None and not _parent_is_asked():
        if time.monotonic() > deadline:
            return False
        time.sleep(TOLD_S / 50)
    return True


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _interrupt(*_: object) -> None:
    global _interrupted_s
    if not _parent_is_told():
        _end_by(signal.SIGINT)
    before, _interrupted_s = _interrupted_s, time.monotonic()
    if _interrupted_s - before > TWICE_S:
        raise KeyboardInterrupt
