"""How a command ends in the process that runs it: its status and `atexit` functions, reported to the parent."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shardproof.endings import signals
from shardproof.endings.exit_status import INTERNAL, INTERRUPTED, INTERRUPTED_SENTENCE, RANK_FAILED
from shardproof.endings.last_words import LastWords
from shardproof.engines.processes import orphans

PASSED_ON = (signal.SIGINT, *signals.ASKING)


def recorded(call: Callable[[], int | None], words: LastWords) -> int:
    """Run the command and its `atexit` functions, tell the parent the status, and return it."""
    process = os.getpid()
    status = _status_of(call)
    flush()
    if os.getpid() == process:  # else a process that a user's code has forked came back here
        words.judged(status)
        if signals.asked is not None:
            orphans.end_by(signals.asked)
        status = _status_after_exit_functions(status)
        flush()
        words.finish(status)
    return status


def _status_of(call: Callable[[], int | None]) -> int:
    """Run the command and return its status. Then an interrupt is ignored, and SIGTERM ends the process at once."""
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*PASSED_ON, signal.SIGCHLD))
            return call() or 0
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signals.end_when_asked()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The sentence is printed only once: an interrupt may come twice, and the parent reports other signals.
        if not signals.interrupt_is_told and signals.asked is None:
            complain(INTERRUPTED_SENTENCE)
        return INTERRUPTED
    except SystemExit as left:  # the command line's own; one of a user's code has become a sentence before
        if isinstance(left.code, str):
            complain(left.code)
            return RANK_FAILED
        return left.code or 0
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        complain(f"internal error: {type(error).__name__}")
        return INTERNAL


def _status_after_exit_functions(status: int) -> int:
    """Run the `atexit` functions; if one exits, which would replace the verdict, report it and return 3."""
    exited: list[str] = []
    previous_hook = sys.unraisablehook

    def hook(lost: Any) -> None:
        if not isinstance(lost.exc_value, SystemExit):
            previous_hook(lost)
            return
        from shardproof.engines.ledger import at_users_line

        message = f": {lost.exc_value}" if lost.exc_value.args else ""
        exited.append(f"an atexit function raised SystemExit{at_users_line(lost.exc_value)}{message}")

    sys.unraisablehook = hook
    atexit._run_exitfuncs()
    sys.unraisablehook = previous_hook
    for sentence in dict.fromkeys(exited):  # a file may be imported more than once
        complain(f"{sentence}; all verdicts were printed before")
    return RANK_FAILED if exited else status


def complain(sentence: str) -> None:
    if sys.stderr is not None:  # else `print` would take standard output
        with contextlib.suppress(OSError, ValueError):  # ValueError if a user's code has closed it
            print(f"shardproof: {sentence}", file=sys.stderr)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the process that started this one
            with contextlib.suppress(OSError, ValueError):  # or its reader has left, or a user's code has closed it
                stream.flush()
