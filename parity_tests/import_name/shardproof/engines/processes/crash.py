"""The place of a crash: Python's fault handler writes the stack of the thread that received a fatal signal.

A segmentation fault or an abort in a C++ extension raises no exception. Each rank writes its stack to its own file,
which the parent reads after the rank has ended.
"""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path
from typing import IO

from shardproof.endings.signals import STACKS
from shardproof.engines.ledger import innermost

_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)  # the line before the stack of a thread
_RANK = re.compile(r'(/lockstep/lockstep\.py", line \d+ in _example|/rank\.py", line \d+ in attempt)$', re.MULTILINE)
_WAITS = re.compile(r'File ".*/lockstep/scheduler\.py", line ')


def path(folder: str | Path, rank: int) -> Path:
    """The crash file of a rank."""
    return Path(folder) / f"crash_{rank}"


def record(file: Path) -> None:
    """Once per process: on a fatal signal, write this process's stack before it ends."""
    faulthandler.enable(file.open("w"), all_threads=False)  # the handler keeps the file open


def stacks_path(folder: str | Path, rank: int) -> Path:
    """The file of a rank's stacks."""
    return Path(folder) / f"stacks_{rank}"


def answer_with_stacks(file: Path) -> IO[str]:
    """Once per process: at the signal STACKS, write the stacks of all threads, even while one holds the interpreter."""
    stacks = file.open("w")
    faulthandler.register(STACKS, stacks, all_threads=True)
    return stacks


def noted_path(folder: str | Path, rank: int) -> Path:
    """The file of the call by which a rank has ended its process."""
    return Path(folder) / f"noted_{rank}"


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


def line_of_running(written: str) -> str | None:
    """`line` of a rank's thread (on lockstep, of the rank whose turn it is), else of the main thread, from all stacks.

    The fault handler writes the current thread first and the main thread last. On lockstep, a rank that waits for its
    turn is in the scheduler.
    """
    stacks = [stack for stack in _STACK.split(written) if _FRAME.search(stack)]
    ranks = [stack for stack in stacks if _RANK.search(stack) and not _WAITS.match(stack.lstrip())]
    return next(filter(None, map(line, [*ranks, *stacks[::-1]])), None)
