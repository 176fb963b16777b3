"""What options hold in common: their declarations, and their text read as values."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from parity_tests.cli import complete

Mesh = Annotated[
    list[str] | None,
    typer.Option(help="Mesh axis sizes: tp=4 or dp=2,cp=2.", metavar="AXIS=N", autocompletion=complete.meshes),
]
Dims = Annotated[list[str] | None, typer.Option(help="Dim sizes: s=16.", metavar="DIM=N")]
Replay = Annotated[str, typer.Argument(help="A replay_<id>.py file.", autocompletion=complete.replays)]
JsonPath = Annotated[
    str | None,
    typer.Option(help="Write JSON to a file; - is standard output, which then has nothing else.", metavar="PATH"),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print failures and the closing line only.")]

# What is counted by hand: ranks, of which there is one at least, and elements, of which there may be none.
WHOLE = {
    "--mesh": "a whole number of at least 1, such as tp=4",
    "--dim": "a whole number of at least 0, such as s=16",
}


def sizes(given: Sequence[str] | None, flag: str) -> dict[str, int]:
    """{"tp": 4, "cp": 2} of ["tp=4,cp=2"]."""
    found = {}
    for text in (part for item in given or () for part in item.split(",")):
        name, equals, value = text.partition("=")
        if not equals or not (value.isascii() and value.isdigit()):
            raise ValueError(f"{flag} {text!r} is not NAME=NUMBER with {WHOLE[flag]}")
        if name.strip() in found:
            raise ValueError(f"{flag} {text!r} says {name.strip()!r} a second time; give each size once")
        found[name.strip()] = int(value)
    return found


def three(given: str) -> list[float]:
    """[1.0, 1.0, 2.0] of "1,1,2"."""
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        found = []
    if len(found) != 3:
        raise ValueError(f"--times {given!r} is not F,I,W, such as 1,1,2")
    for letter, value in zip("FIW", found, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--times {given}: {letter} must be finite and at least 0")
    return found


def options(given: Sequence[str] | None) -> dict[str, Any]:
    """{"temperature": 2.0} of ["temperature=2.0"]; what is no Python literal stays text."""
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} is not NAME=VALUE, such as temperature=2.0")
        if value in ("true", "false"):
            raise ValueError(f"--option {text!r}: write {value.title()}, as in Python")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found
