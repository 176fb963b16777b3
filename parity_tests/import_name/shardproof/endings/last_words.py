"""Shared memory in which a command's process reports its progress to its parent.

It calls `finish` last: a process that ends without this call has given no verdict, whatever its exit code says. A run
of lockstep beats while the interpreter is free; `note` names a line that is about to end the process.
"""

from __future__ import annotations

import mmap
import struct

SIZE = 1 << 16
RUNNING, JUDGED, FINISHED = range(3)
_HEAD = struct.Struct("=BiH")  # state, status, length of the note
_BEAT = struct.Struct("=Qd")
_LIMIT = struct.Struct("=d")
_LENGTH = struct.Struct("=I")
_ASKED_AT, _BEAT_AT, _LIMIT_AT, _TEXT_AT, _CASE_AT = 8, 16, 32, 64, 4096


class LastWords:
    """The progress of one child; `clear` prepares the memory for the next child."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)
        self._beats = 0

    def clear(self) -> None:
        self._memory[:] = bytes(SIZE)
        self._beats = 0

    def judged(self, status: int) -> None:
        """All verdicts are printed; only the `atexit` functions are left."""
        self._write(JUDGED, status)

    def finish(self, status: int) -> None:
        self._write(FINISHED, status)

    def note(self, text: str) -> None:
        """Name the call that is about to end the process."""
        data = text.encode(errors="backslashreplace")[: _CASE_AT - _TEXT_AT]
        self._memory[_TEXT_AT : _TEXT_AT + len(data)] = data
        state, status, _ = _HEAD.unpack_from(self._memory, 0)
        _HEAD.pack_into(self._memory, 0, state, status, len(data))

    def runs(self, case: str) -> None:
        """Store the case, as JSON, that the ranks run next; a case that is too long is left out."""
        data = case.encode(errors="backslashreplace")
        at = _CASE_AT + _LENGTH.size
        data = data if at + len(data) <= SIZE else b""
        self._memory[at : at + len(data)] = data
        _LENGTH.pack_into(self._memory, _CASE_AT, len(data))

    def beat(self, limit_s: float) -> None:
        """The interpreter is free; the next beat is due within `limit_s`, or never if that is 0."""
        self._beats += 1
        _BEAT.pack_into(self._memory, _BEAT_AT, self._beats, limit_s)

    def limit_runs(self, seconds: float) -> None:
        """The user allows a rank to wait this long in a run."""
        _LIMIT.pack_into(self._memory, _LIMIT_AT, seconds)

    def ask(self) -> None:
        """The parent's: a signal has asked the command to end, and is passed on to the child."""
        self._memory[_ASKED_AT] = 1

    @property
    def is_asked(self) -> bool:
        return bool(self._memory[_ASKED_AT])

    @property
    def finished(self) -> int | None:
        """The status of a command that has ended."""
        state, status, _ = _HEAD.unpack_from(self._memory, 0)
        return status if state == FINISHED else None

    @property
    def is_judged(self) -> bool:
        return _HEAD.unpack_from(self._memory, 0)[0] >= JUDGED

    @property
    def noted(self) -> str:
        length = _HEAD.unpack_from(self._memory, 0)[2]
        return self._memory[_TEXT_AT : _TEXT_AT + length].decode(errors="replace")

    @property
    def case(self) -> str:
        """The case of the last run; empty before the first."""
        (length,), at = _LENGTH.unpack_from(self._memory, _CASE_AT), _CASE_AT + _LENGTH.size
        return self._memory[at : at + length].decode(errors="replace")

    @property
    def pulse(self) -> tuple[int, float]:
        """The number of beats and the seconds within which the next is due."""
        return _BEAT.unpack_from(self._memory, _BEAT_AT)

    @property
    def run_limit(self) -> float:
        """The seconds of `limit_runs`; 0 before its first call."""
        return _LIMIT.unpack_from(self._memory, _LIMIT_AT)[0]

    def _write(self, state: int, status: int) -> None:
        length = _HEAD.unpack_from(self._memory, 0)[2]
        _HEAD.pack_into(self._memory, 0, state, status, length)
