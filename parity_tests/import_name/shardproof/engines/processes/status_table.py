"""The status table: 4 KiB of shared memory per rank with its current state.

Each rank writes its own slot before and after every collective; the parent reads all slots without asking, so even a
rank that hangs in native code or is killed has recorded its place and its last row of the ledger.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOT = 4096
TEXT = 512  # for head and text; the rest holds the row
_HEAD = struct.Struct("=QBHH")

STARTING, COMPUTING, WAITING, FINISHED = range(4)
_PHRASES = {
    STARTING: ("starts", "starts"),
    COMPUTING: ("computes{at}, nothing issued yet", "computes{at}; its last was {}"),
    WAITING: ("waits", "waits in {}"),
    FINISHED: ("returned, nothing issued", "returned; its last was {}"),
}


@dataclass(frozen=True)
class Status:
    """One slot: the number of writes, the state, and the last collective issued."""

    writes: int
    state: int
    text: str

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, line: str | None = None) -> str:
        """A sentence on the rank's state; `line` is the file:line where it computes, if known."""
        bare, full = _PHRASES[self.state]
        return (full if self.text else bare).format(self.text, at=f" at {line}" if line else "")


class StatusTable:
    """The slots of all ranks in one shared file; without a path, in this process's own memory."""

    def __init__(self, path: Path | str | None, world: int) -> None:
        self.world = world
        if path is None:
            self._memory = mmap.mmap(-1, SLOT * world)
            return
        with open(path, "a+b") as file:
            file.truncate(SLOT * world)
            self._memory = mmap.mmap(file.fileno(), SLOT * world)

    def status(self, rank: int) -> Status:
        writes, state, length, _ = _HEAD.unpack_from(self._memory, rank * SLOT)
        start = rank * SLOT + _HEAD.size
        return Status(writes, state, self._memory[start : start + length].decode(errors="replace"))

    def rows(self, rank: int) -> tuple[Any, ...]:
        """The calls that the rank had not waited for, and last the one it is in or has issued last.

        Empty if there is none, or the rank died while it wrote them.
        """
        length = _HEAD.unpack_from(self._memory, rank * SLOT)[3]
        start = rank * SLOT + TEXT
        try:
            return pickle.loads(self._memory[start : start + length]) if length else ()
        except Exception:  # a half-written pickle may raise anything
            return ()

    def writes(self) -> tuple[int, ...]:
        """Write counters of all ranks: unchanged counters mean no progress."""
        return tuple(_HEAD.unpack_from(self._memory, rank * SLOT)[0] for rank in range(self.world))

    def slot(self, rank: int) -> Slot:
        return Slot(self._memory, rank)

    def clear(self) -> None:
        """Reset all slots, as if no rank had ever written."""
        self._memory[:] = bytes(SLOT * self.world)

    def close(self) -> None:
        self._memory.close()


class Slot:
    """The writer's side of one rank's slot."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory, self._start = memory, rank * SLOT
        self._writes = self._text_length = self._row_length = 0

    def enter(self, state: int) -> None:
        """Set a new state and keep the last collective."""
        self._writes += 1
        _HEAD.pack_into(self._memory, self._start, self._writes, state, self._text_length, self._row_length)

    def clear(self) -> None:
        """Reset the slot, as if the rank had never written."""
        self._writes = self._text_length = self._row_length = 0
        _HEAD.pack_into(self._memory, self._start, 0, STARTING, 0, 0)

    def issue(self, row: object, state: int = WAITING, open_rows: Sequence[object] = ()) -> None:
        """Set a new last collective; None: none yet. `open_rows` are calls that are not waited for yet.

        If the row is too long for the slot, open calls are left out first, then the row itself, which stays as text.
        """
        for rows in ((*open_rows, row), (row,)):
            data = b"" if row is None else pickle.dumps(rows)
            if len(data) <= SLOT - TEXT:
                break
        else:
            data = b""
        self._memory[self._start + TEXT : self._start + TEXT + len(data)] = data
        self._row_length = len(data)
        self.issue_as_text(row, state)

    def issue_as_text(self, row: object, state: int = WAITING) -> None:
        """The same without the row itself, in a third of the time."""
        text = b"" if row is None else str(row).encode()[: TEXT - _HEAD.size]
        start = self._start + _HEAD.size
        self._memory[start : start + len(text)] = text
        self._text_length = len(text)
        self.enter(state)
