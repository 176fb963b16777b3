"""Errors raised by a user's code: the chain of causes, and the message, made safe to print.

This is the one door for text that is not this project's. A lone surrogate cannot be written to a file or a terminal, a
control character is no XML, and an escape sequence changes the terminal. Here each becomes its escape, as in `repr`; a
line break and a tab stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from shardproof.endings import exits, signals

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

RAISED = (Exception, SystemExit)  # of a user's code in a thread of a rank, which another exception ends
EXITS = (SystemExit, KeyboardInterrupt)  # by them, code means to end its process

# C0 and C1 controls but tab and line feed, lone surrogates, and marks that change the direction of the text after them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def pass_interrupt(error: BaseException) -> None:
    """Raise the KeyboardInterrupt of a signal again; anything else is of the code that raised it.

    For `except BaseException`: what ends a task or skips a test need be no Exception. An exit of a process that a
    user's code has forked ends that process.
    """
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if (is_interrupt and signals.is_interrupted()) or (isinstance(error, EXITS) and exits.is_forked()):
        raise error


def printable(text: str) -> str:
    """The text with an escape for each character that is not safe to print: `\\x1b`, `\\udc80`."""
    return _UNPRINTABLE.sub(lambda found: repr(found.group())[1:-1], text.replace("\r\n", "\n"))


def message_of(error: BaseException) -> str:
    """The message of an exception, safe to print, also where making it raises another."""
    try:
        return printable(str(error))
    except BaseException as second:
        pass_interrupt(second)
        return f"<its message raises {type(second).__name__}>"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, its cause or else its context, and so on; each once, since `raise e from e` is a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def first_line_of(error: BaseException) -> str:
    """The first line of `message_of`; empty if there is none."""
    return next(iter(message_of(error).strip().splitlines()), "")


def none_if_raised(call: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
    """`call`, with None where a user's code raises in it: on a case that a failure is tried on, this proves nothing."""

    @wraps(call)
    def calling(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result | None:
        try:
            return call(*arguments, **keywords)
        except BaseException as error:
            pass_interrupt(error)
            return None

    return calling
