"""Where a rank crashed: Python's fault handler writes the stack of the thread that received a fatal signal.

A segmentation fault or an abort in a C++ extension leaves no exception. The stack is in a file of the rank, which only
its parent reads, and only once the rank has ended.
"""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path

from parity_tests.harness.run.ledger import innermost

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


def path(folder: str | Path, rank: int) -> Path:
    """The file of a rank."""
    return Path(folder) / f"crash_{rank}"


def record(file: Path) -> None:
    """Once per process: a fatal signal writes this process's stack, and then ends it as it would have."""
    faulthandler.enable(file.open("w"), all_threads=False)  # the handler keeps the file open


def stack(file: Path) -> str:
    """What a rank that has ended wrote; empty for one that wrote nothing."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def line(written: str) -> str | None:
    """file:line of the innermost frame of a stack that is the user's, and no library's if there is such a frame."""
    frames = [(name, int(number)) for name, number in _FRAME.findall(written)]
    return innermost(frames[::-1])  # the fault handler writes the innermost first
