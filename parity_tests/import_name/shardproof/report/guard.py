"""Run a command: returns an exit status, and reports a user's mistake in one sentence without a traceback."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shardproof.endings import exit_status, exits, signals
from shardproof.endings.exit_status import (
    EQUAL,
    INTERNAL,
    INTERRUPTED,
    INTERRUPTED_SENTENCE,
    NOTHING,
    RANK_FAILED,
    UNREAD,
    USAGE,
)
from shardproof.endings.raised import EXITS, message_of
from shardproof.engines.ledger import innermost
from shardproof.places import SHARDPROOF

COMMAND_LINE = ("typer", "click")  # packages that leave by SystemExit once a command has returned a status
OF_THE_COMMAND = (*COMMAND_LINE, "rich", "jax", "jaxlib", "numpy", "hypothesis", "cloudpickle")
CLI = str(SHARDPROOF / "cli")
HIGH = 512  # the least file descriptor of a copy of an output


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


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside this block the process ignores signals that ask it to end, such as a second one during printing."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, *signals.raising()) if is_main else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def guarded(call: Callable[[], Any]) -> int:
    """The status of a call, with one sentence for: 2 a user's mistake, 3 lost processes, 4 a missing requirement.

    3 also for a SystemExit that the command line did not raise; 70 for an internal error, after its traceback; 141 if
    the reader of standard output has closed it, as `| head` does, and then nothing is printed.
    """
    status = EQUAL
    try:
        with delayed_interrupts(), _while_output_is_read(), own_output():
            status = call() or EQUAL
        return status
    except _Unread:
        return UNREAD
    except (KeyboardInterrupt, SystemExit) as stop:  # typer turns the first into an exit
        if exits.is_forked():
            raise  # ends the process that a user's code has forked
        if not (_is_from_command_line(stop) if isinstance(stop, SystemExit) else signals.is_interrupted()):
            return _report(stop)
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
            raise
        if signals.asked is None:  # else the parent of this process tells of the signal
            complain(INTERRUPTED_SENTENCE)
        signals.interrupt_is_told = True
        return INTERRUPTED
    except Exception as error:
        reported = _report(error)
        return exit_status.worst((status, reported)) or reported


@contextmanager
def without_hiding(status: int) -> Iterator[None]:
    """A block that writes files. If a file cannot be written, as on a full disk, a worse `status` is kept.

    Errors: OSError if `status` is not worse than the status of this error.
    """
    try:
        yield
    except OSError as error:
        own, sentence = sentence_of(error)
        if exit_status.worst((status, own)) == own:
            raise
        complain(sentence)


def _is_from_command_line(left: SystemExit) -> bool:
    """Whether the command line has raised this SystemExit, and not a user's code."""
    *_, (frame, _) = traceback.walk_tb(left.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in COMMAND_LINE


def _report(error: BaseException) -> int:
    """The status of an error, after its sentence is printed; an internal error's traceback is printed before that."""
    status, sentence = sentence_of(error)
    if status == INTERNAL:
        print_traceback(error)
    complain(sentence)
    return status


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an internal error; nothing is printed if standard error is closed or its disk is full."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exception(error)


def sentence_of(error: BaseException) -> tuple[int, str]:
    """The status and sentence of a user's mistake, or of an internal error: an exception that no user's code raised."""
    known = _known(error)
    if known is not None:
        return known
    frames = [
        (frame.f_code.co_filename, line, frame.f_globals.get("__name__", "").partition(".")[0])
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    at = innermost(
        [(file, line) for file, line, package in frames if package not in OF_THE_COMMAND and not file.startswith(CLI)]
    )
    raised = f"{type(error).__name__}: {message_of(error) or 'no message'}"
    if at or isinstance(error, EXITS):
        return exit_status.of_error(error), f"{at or 'code without a line'} raised {raised}"
    file, line, _ = frames[-1] if frames else ("?", 0, "")
    return INTERNAL, f"internal error at {os.path.basename(file)}:{line}: {raised}; please report it with its traceback"


def _known(error: BaseException) -> tuple[int, str] | None:
    """The status and sentence of an exception that is made to be read; None for any other."""
    if isinstance(error, OSError):
        return USAGE, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if isinstance(error, MemoryError):
        return USAGE, f"{error or 'the memory is used up'}; choose smaller sizes by --dim"
    if isinstance(error, (ValueError, TypeError, ImportError)):
        return exit_status.of_error(error), str(error)
    # Imported only now, so that shell completion and --help stay fast.
    from shardproof.declare.discover import UnusableTarget
    from shardproof.engines.failure import NotRun
    from shardproof.engines.processes.forks import ServerGone
    from shardproof.judge.reference import ReferenceFailure

    if isinstance(error, NotRun):
        return NOTHING, f"not run: {error}"
    if isinstance(error, ServerGone):
        return RANK_FAILED, str(error)
    is_sentence = isinstance(error, (UnusableTarget, ReferenceFailure, exit_status.NotJudged))
    return (exit_status.of_error(error), str(error)) if is_sentence else None


def complain(sentence: str) -> None:
    """Print a sentence of this command on standard error; nothing is printed if it is closed or its disk is full."""
    from rich.console import Console

    from shardproof.report.sentence import Sentence

    # Left to itself, rich would raise where the disk is full, and exit with 1 where nobody reads.
    text, stderr = io.StringIO(), Console(stderr=True)
    console = Console(file=text, force_terminal=stderr.is_terminal, soft_wrap=True)
    console.print(Sentence(f"shardproof: {sentence}", style="red").broken_for(stderr, stderr.width))
    if sys.stderr is not None:  # closed by the process that started this one
        with contextlib.suppress(OSError, ValueError):  # ValueError if a user's code has closed it
            sys.stderr.write(text.getvalue())
            sys.stderr.flush()


_replaced: list[Any] = []  # a stream that wraps another closes it when nothing refers to it any more


@contextmanager
def own_output() -> Iterator[None]:
    """Run a user's code in this block; afterwards verdicts are printed where they would have been printed before it."""
    from rich.console import Console

    before, copies = (sys.stdout, sys.stderr), dict[int, int]()
    layers = [layer for stream in (*before, sys.__stdout__, sys.__stderr__) for layer in _layers(stream)]
    attributes = [(layer, dict(vars(layer))) for layer in layers if hasattr(layer, "__dict__")]
    printing = Console.print
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed
            copies[number] = _copy(number)
    try:
        yield
    finally:
        replaced = [stream for stream in (sys.stdout, sys.stderr) if not any(stream is each for each in before)]
        _replaced.extend(replaced)
        try:
            for stream in replaced:
                with contextlib.suppress(Exception):  # a stream of a user's code may raise anything
                    stream.flush()
        finally:  # also if the reader of standard output has closed it
            Console.print = printing
            for layer, own in attributes:  # a user's code may set `sys.stdout.write`
                vars(layer).clear()
                vars(layer).update(own)
            for number, copy in copies.items():
                with contextlib.suppress(OSError):  # a user's code has closed it too
                    os.dup2(copy, number)
                    os.close(copy)
            sys.stdout, sys.stderr = (_open_stream(stream, number) for number, stream in enumerate(before, start=1))


def _copy(number: int) -> int:
    """A copy of a file descriptor, with a number so high that a user's `os.closerange(3, 100)` does not close it."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH)
    except OSError:  # the limit of open files is lower
        return os.dup(number)


def _layers(stream: Any) -> Iterator[Any]:
    """The stream and the streams below it: text, then bytes, then the file descriptor."""
    while stream is not None:
        yield stream
        try:
            if isinstance(stream, _Reader):
                stream = stream._stream
            else:
                stream = getattr(stream, "raw" if isinstance(stream, io.BufferedWriter) else "buffer", None)
        except ValueError:  # detached by a user's code
            return


@contextmanager
def prints_on_stderr() -> Iterator[None]:
    """Redirect to standard error everything that functions print, in this process and on ranks."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _open_stream(stream: Any, number: int) -> Any:
    """The stream, or one on its file descriptor if a user's code has closed it, as by `sys.__stdout__.close()`."""
    if not getattr(stream, "closed", False):
        return stream
    raw = io.FileIO(number, "w", closefd=False)
    again = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=True)
    return _Reader(again) if isinstance(stream, _Reader) else again


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

    def close(self) -> None:
        """A user's code that closes standard output would take the verdict with it."""
        self.flush()

    @property
    def buffer(self) -> Any:
        """A copy of the byte stream, which a user's wrapper may close; the stream itself stays open for verdicts."""
        self.flush()
        return open(os.dup(self._stream.fileno()), "wb")

    def detach(self) -> Any:
        """As `buffer`."""
        return self.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _while_output_is_read() -> Iterator[None]:
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
