"""The place of a crash: Python's fault handler writes the stack of the thread that received a fatal signal.

A segmentation fault or an abort in a C++ extension raises no exception. Each rank writes its stack to its own file,
which the parent reads after the rank has ended.
"""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path

from shardproof.engines.ledger import innermost

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


def path(folder: str | Path, rank: int) -> Path:
    """The crash file of a rank."""
    return Path(folder) / f"crash_{rank}"


def record(file: Path) -> None:
    """Once per process: on a fatal signal, write this process's stack before it ends."""
    faulthandler.enable(file.open("w"), all_threads=False)  # the handler keeps the file open


def stack(file: Path) -> str:
    """The text that an ended rank wrote, or an empty string."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def line(written: str) -> str | None:
    """file:line of the stack's innermost frame of user code, outside libraries if possible."""
    frames = [(name, int(number)) for name, number in _FRAME.findall(written)]
    return innermost(frames[::-1])  # the fault handler writes the innermost frame first
