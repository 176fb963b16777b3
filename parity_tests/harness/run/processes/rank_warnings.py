"""Warnings of ranks: what the parent has shown at an import is not shown again, any other warning once for all ranks.

Filters are left alone, since what a library sets on import must hold afterwards: only where warnings are written is
another function put.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def not_shown() -> Iterator[None]:
    """Write no warning inside, unless what is imported there writes its own."""
    before = warnings.showwarning
    warnings.showwarning = _nothing
    try:
        yield
    finally:
        if warnings.showwarning is _nothing:
            warnings.showwarning = before


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Write each warning once inside, though ranks that are threads raise it in each example and each rank."""
    before, shown = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        text = warnings.formatwarning(message, category, filename, lineno)
        if text not in shown:
            shown.add(text)
            before(message, category, filename, lineno, *rest)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before


def show_once(folder: str) -> None:
    """From here on, write a warning only if no process has written it that was given this folder."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        name = f"warning_{hashlib.sha256(text.encode()).hexdigest()}"
        with contextlib.suppress(FileExistsError):  # it is there: another rank was first
            os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
            print(text, file=file or sys.stderr, end="", flush=True)

    warnings.showwarning = show


def _nothing(*_: Any, **__: Any) -> None:
    """Written nowhere."""
