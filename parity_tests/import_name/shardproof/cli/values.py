"""Shared by all options: their declarations, and parsing their text."""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import typer

from shardproof.cli import complete

Mesh = Annotated[
    list[str] | None,
    typer.Option(help="Mesh axis sizes: tp=4 or dp=2,cp=2.", metavar="AXIS=N", autocompletion=complete.meshes),
]
Dims = Annotated[list[str] | None, typer.Option(help="Dim sizes: s=16.", metavar="DIM=N")]
Replay = Annotated[str, typer.Argument(help="A replay_<id>.py file.", autocompletion=complete.replays)]
JsonPath = Annotated[
    str | None,
    typer.Option(
        help="Write JSON to a file that ends in .json; - or no path is standard output, which then has nothing else.",
        metavar="PATH",
    ),
]
HtmlPath = Annotated[
    str | None,
    typer.Option(help="Write the verdict as a page with drawings, one file; - is standard output.", metavar="PATH"),
]
FigurePath = Annotated[
    str | None, typer.Option(help="Write the picture: a path ending in .png, .svg or .pdf.", metavar="PATH")
]
Traceback = Annotated[
    bool, typer.Option("--traceback", help="Print the full traceback of a rank that raised, libraries included.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print failures and the closing line only.")]

Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Seconds for which a rank may compute without reaching a collective; default: 30 on lockstep, 10 in "
        "processes.",
        metavar="SECONDS",
    ),
]

# Integers from the user: at least 1 rank, at least 0 elements.
INTEGERS = {
    "--mesh": "a whole number of at least 1, such as tp=4",
    "--dim": "a whole number of at least 0, such as s=16",
}
SIZED = {"--mesh": "mesh axis", "--dim": "dim"}


def sizes(words: Sequence[str] | None, flag: str) -> dict[str, int]:
    """{"tp": 4, "cp": 2} of ["tp=4,cp=2"]."""
    by_name = {}
    for text in (part for item in words or () for part in item.split(",")):
        name, equals, value = text.partition("=")
        if not equals or not (value.isascii() and value.isdigit()):
            raise ValueError(f"{flag} {text!r} is not NAME=NUMBER with {INTEGERS[flag]}")
        if name.strip() in by_name:
            raise ValueError(f"{flag} {text!r} says {name.strip()!r} a second time; give each size once")
        by_name[name.strip()] = int(value)
        if flag == "--dim" and 8 * int(value) > memory():
            gb = 8 * int(value) // 10**9
            raise ValueError(f"{flag} {text!r} needs {gb} GB for a row of float64, more than there is; make it smaller")
    return by_name


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def unsuitable(error: typer.BadParameter, verb: Callable[..., Any], words: Sequence[str]) -> Exception:
    """A ValueError for a number that an option of this verb does not take; the parser's own error for all else."""
    names = getattr(error.param, "opts", [])
    given = [after for word, after in pairwise(words) if word in names]
    given += [word.partition("=")[2] for word in words if "=" in word and word.partition("=")[0] in names]
    declared = get_type_hints(verb, include_extras=True).get(getattr(error.param, "name", None) or "")
    option = getattr(declared, "__metadata__", (None,))[-1]
    lowest, highest = getattr(option, "min", None), getattr(option, "max", None)
    if not given or lowest is None:
        return error
    number = "number" if isinstance(lowest, float) else "whole number"
    limits = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
    return ValueError(f"{names[0]} {given[-1]!r} is not a {number} {limits}")


def size_as_option(error: Exception, verb: Callable[..., Any], words: Sequence[str]) -> Exception:
    """A ValueError for a size that is written as an option, `--tp 4`; the parser's own error for all else."""
    option = getattr(error, "option_name", "")
    given = [after for word, after in pairwise(words) if word == option]
    given += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    flags = [flag for flag in SIZED if flag.removeprefix("--") in get_type_hints(verb)]
    if not option or not flags or not given or not given[0].isdecimal():
        return error
    text = f"{option.lstrip('-')}={given[0]}"
    remedy = ", or ".join(f"{flag} {text} for a {SIZED[flag]}" for flag in flags)
    return ValueError(f"{option} {given[0]!r}: there is no option {option}; write {remedy}")


def three(text: str) -> list[float]:
    """[1.0, 1.0, 2.0] of "1,1,2"."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3:
        raise ValueError(f"--times {text!r} is not F,I,W, such as 1,1,2")
    for letter, value in zip("FIW", numbers, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--times {text}: {letter} must be finite and at least 0")
    return numbers


def options(words: Sequence[str] | None) -> dict[str, Any]:
    """{"temperature": 2.0} of ["temperature=2.0"]; anything but a Python literal stays text."""
    by_name = {}
    for text in words or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} is not NAME=VALUE, such as temperature=2.0")
        if value in ("true", "false"):
            raise ValueError(f"--option {text!r}: write {value.title()}, as in Python")
        try:
            by_name[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            by_name[name] = value
    return by_name
