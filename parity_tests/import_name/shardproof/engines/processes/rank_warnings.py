"""Warnings on ranks: those that say nothing new are dropped, and any other warning is shown once for all ranks.

The parent has shown the warnings of an import, and a verdict answers torch's doubt of the gradient of a collective.
Filters stay unchanged, because a library's own filters must hold afterwards: only the function that writes warnings is
replaced.
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

DOUBTED_GRADIENT = "an autograd kernel was not registered"  # torch of `dist.all_reduce` under autograd


@contextlib.contextmanager
def not_shown() -> Iterator[None]:
    """Write no warning inside the block, except from libraries that write their own."""
    before = warnings.showwarning
    warnings.showwarning = _nothing
    try:
        yield
    finally:
        if warnings.showwarning is _nothing:
            warnings.showwarning = before


@contextlib.contextmanager
def without_repeats() -> Iterator[None]:
    """Write each warning once inside the block, although every rank's thread raises it in every example."""
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
    """From now on, write each warning only once among all processes with this folder."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if DOUBTED_GRADIENT in str(message):
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        name = f"warning_{hashlib.sha256(text.encode()).hexdigest()}"
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
            print(text, file=file or sys.stderr, end="", flush=True)

    warnings.showwarning = show


def _nothing(*_: Any, **__: Any) -> None:
    """Discard the warning."""
