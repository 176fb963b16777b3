"""Run a command: returns an exit status, and reports a user's mistake in one sentence without a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shardproof.engines.exit_status import EQUAL, INTERRUPTED, NOTHING, RANK_FAILED, UNREAD, USAGE


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Python drops a KeyboardInterrupt raised in a callback; inside this block it is raised again in the main thread.

    It is raised at the next call or return. If that is inside a callback too, it is dropped and raised once more.
    """
    previous_hook = sys.unraisablehook

    def hook(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            sys.setprofile(again)
        else:
            previous_hook(lost)

    def again(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code is not hook.__code__:  # raised inside the hook it would be lost
            raise KeyboardInterrupt  # Python removes a profiler that raises

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook


def guarded(call: Callable[[], Any]) -> int:
    """The status of a call, with one sentence for: 2 a user's mistake, 3 lost processes, 4 a missing requirement.

    141 if the reader of standard output has closed it, as `| head` does; then nothing is printed.
    """
    try:
        with delayed_interrupts(), _while_it_is_read():
            return call() or EQUAL
    except _Unread:
        return UNREAD
    except (KeyboardInterrupt, SystemExit) as stop:  # typer turns the first into an exit
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
            raise
        _complain("interrupted; what was not printed was not judged")
        return INTERRUPTED
    except Exception as error:
        outcome = _sentence(error)
        if outcome is None:
            raise
        status, sentence = outcome
        _complain(sentence)
        return status


def _sentence(error: Exception) -> tuple[int, str] | None:
    """The status and sentence for a user's mistake; None for any other exception, which is this project's bug."""
    if isinstance(error, OSError):
        return USAGE, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if isinstance(error, MemoryError):
        return USAGE, f"{error or 'the memory is used up'}; choose smaller sizes by --dim"
    if isinstance(error, (ValueError, TypeError, ImportError)):
        return USAGE, str(error)
    # Imported only now, so that shell completion and --help stay fast.
    from shardproof.declare.discover import UnusableTarget
    from shardproof.engines.failure import NotRun
    from shardproof.engines.processes.forks import ServerGone
    from shardproof.judge.reference import ReferenceFailure

    if isinstance(error, NotRun):
        return NOTHING, f"not run: {error}"
    if isinstance(error, ServerGone):
        return RANK_FAILED, str(error)
    return (USAGE, str(error)) if isinstance(error, (UnusableTarget, ReferenceFailure)) else None


def _complain(sentence: str) -> None:
    from rich.console import Console

    from shardproof.report.sentence import Sentence

    Console(stderr=True, soft_wrap=True).print(Sentence(f"shardproof: {sentence}", style="red"))


class _Unread(BaseException):
    """The reader of standard output has closed it.

    This is not an OSError, because typer and rich would turn that into their own status.
    """


class _Reader:
    """A stream whose reader may close it; everything except writing is passed to the stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise _Unread from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise _Unread from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _while_it_is_read() -> Iterator[None]:
    """Standard output that raises once its reader is gone; unwritten text is then discarded."""
    stream = sys.stdout
    if stream is None:  # closed by the process that started this one
        yield
        return
    sys.stdout = _Reader(stream)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except _Unread:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise
    finally:
        sys.stdout = stream
