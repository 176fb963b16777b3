"""Show how far a long loop is. This file imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def followed(items: Sequence[Item], doing: str) -> Iterator[Item]:
    """The items one by one; standard error has a bar of them if it is a terminal."""
    from rich.console import Console
    from rich.progress import track

    stderr = Console(stderr=True)
    yield from track(items, doing, console=stderr, transient=True, disable=not stderr.is_terminal)
