"""Sentences: a terminal breaks a line between words at LINE columns, and indents the rest a little more.

A pipe and a file have it whole, so that a search finds it, unless the environment sets COLUMNS.
"""

from __future__ import annotations

import io
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

LINE = 80  # columns
UNBROKEN = "\0"  # a space inside of code, while its line is broken
BELOW = " " * 4  # where the rest of a row begins
# Quoted text, and a command with its options and files: a reader copies them.
CODE = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)|`[^`\n]*`|\bshardproof [a-z]+(?: [\w-]*[-./=:][\w./=:*-]*\w)*")


@dataclass(frozen=True)
class Sentence:
    """One or several lines, each with its own indentation."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.broken_for(console, options.max_width)

    def broken_for(self, console: Console, width: int) -> Text:
        """The text as this console has it; another one may print it."""
        text = self.text
        if is_broken(console):
            width = min(LINE, width) if console.is_terminal else width
            text = "\n".join(_wrapped(line, width) for line in text.splitlines())
        return Text(text, style=self.style)


@dataclass(frozen=True)
class Row:
    """A line of columns; a narrow terminal breaks the last column at commas, and indents the rest."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, width = self.text, options.max_width
        if is_broken(console) and len(text) > width:
            parts = text.replace(", ", f",\n{BELOW}").splitlines()
            text = "\n".join(line for part in parts for line in _lines(part, width, BELOW))
        yield Text(text, style=self.style)


def is_broken(console: Console) -> bool:
    """Whether lines are broken: on a terminal, and in an output of this process whose reader sets COLUMNS."""
    return console.is_terminal or ("COLUMNS" in os.environ and console.file in (sys.stdout, sys.stderr))


def _wrapped(line: str, width: int) -> str:
    if len(line) > width:  # columns of a heading move together before it is broken
        line = re.sub(r"(?<=\S) {3,}", "  ", line)
    below = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(_lines(line, width, below))


def _lines(text: str, width: int, below: str) -> list[str]:
    """The broken lines; a word that is too long for its indentation moves to the left."""
    text = CODE.sub(lambda code: code[0].replace(" ", UNBROKEN) if len(code[0]) <= width // 2 else code[0], text)
    lines = textwrap.wrap(text, width, subsequent_indent=below, break_on_hyphens=False, break_long_words=False)
    lines = [line.replace(UNBROKEN, " ") for line in lines]
    return [line[min(max(len(line) - width, 0), len(line) - len(line.lstrip())) :] for line in lines]


def as_text(report: RenderableType, width: int | None = None) -> str:
    """The lines of a report: whole, or broken between words at `width` as a terminal breaks them."""
    out = io.StringIO()
    # In a notebook, rich would display the table at once instead of writing it.
    console = Console(
        file=out,
        width=width,
        force_terminal=width is not None,
        color_system=None,
        legacy_windows=False,
        force_jupyter=False,
    )
    console.print(report, highlight=False, soft_wrap=width is None)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def print_report(report: RenderableType, stream: TextIO | None) -> None:
    """Print a report: on a terminal in its width, elsewhere as plain text. A stream of None is closed."""
    if stream is None:
        return
    console = Console(file=stream)
    if is_broken(console):
        console.print(report, highlight=False)
    else:
        stream.write(f"{report}\n")  # a user's code may have replaced `print`
