"""The status table: 512 bytes of shared memory per rank that say what it is doing.

Each rank writes its own slot before and after every collective; the parent reads all slots without asking, so
a rank that hangs in native code or is killed has already recorded where it was.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

SLOT = 512
_HEAD = struct.Struct("=QBH")

STARTING, COMPUTING, WAITING, FINISHED = range(4)
_PHRASES = {
    STARTING: ("starts", "starts"),
    COMPUTING: ("computes, nothing issued yet", "computes; its last was {}"),
    WAITING: ("waits", "waits in {}"),
    FINISHED: ("finished, nothing issued", "finished; its last was {}"),
}


@dataclass(frozen=True)
class Status:
    """One slot: how often it was written, the state, and the last collective issued."""

    writes: int
    state: int
    text: str

    def __str__(self) -> str:
        bare, full = _PHRASES[self.state]
        return full.format(self.text) if self.text else bare


class StatusTable:
    """The slots of all ranks in one shared file; without a path, in memory of this process alone."""

    def __init__(self, path: Path | str | None, world: int) -> None:
        self.world = world
        if path is None:
            self._memory = mmap.mmap(-1, SLOT * world)
            return
        with open(path, "a+b") as file:
            file.truncate(SLOT * world)
            self._memory = mmap.mmap(file.fileno(), SLOT * world)

    def status(self, rank: int) -> Status:
        writes, state, length = _HEAD.unpack_from(self._memory, rank * SLOT)
        start = rank * SLOT + _HEAD.size
        return Status(writes, state, self._memory[start : start + length].decode(errors="replace"))

    def writes(self) -> tuple[int, ...]:
        """Write counters of all ranks: unchanged means that nothing has moved."""
        return tuple(_HEAD.unpack_from(self._memory, rank * SLOT)[0] for rank in range(self.world))

    def slot(self, rank: int) -> Slot:
        return Slot(self._memory, rank)

    def close(self) -> None:
        self._memory.close()


class Slot:
    """The writer's side of one rank's slot."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory, self._start = memory, rank * SLOT
        self._writes = self._length = 0

    def enter(self, state: int) -> None:
        """A new state, the same last collective."""
        self._writes += 1
        _HEAD.pack_into(self._memory, self._start, self._writes, state, self._length)

    def issue(self, text: str, state: int = WAITING) -> None:
        """A new last collective; an empty text: none yet."""
        data = text.encode()[: SLOT - _HEAD.size]
        start = self._start + _HEAD.size
        self._memory[start : start + len(data)] = data
        self._length = len(data)
        self.enter(state)
