"""The journal of a command: the schemes it has begun and judged, in a file that outlives its process.

The parent creates the file. The process that judges writes a record when it begins to import a file or to judge a
scheme, and the outcome when that is done. If the process dies, the parent starts another one, which takes the outcomes
from here; the key that was begun and not done becomes an outcome with a sentence on the death.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from collections.abc import Iterator
from typing import IO, Any

CHILD, BEGUN, DONE, FOUND, LOST, FAILED, WRITES = b"C", b"B", b"D", b"F", b"L", b"R", b"W"
_HEAD = struct.Struct("=cII")  # kind, bytes of the key, bytes of the content

IMPORT = "import "  # the key of an import is this and the file

current: Journal | None = None  # of the command in this process


class Journal:
    """Records of (kind, key, content), which are only appended. A key is begun, and then done or lost."""

    def __init__(self, file: IO[bytes]) -> None:
        import fcntl  # here: only a command that forks has a journal

        self._file = file  # keeps it open
        self._fd = file.fileno()
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_APPEND)
        self._is_full = False
        self._file_id = os.fstat(self._fd)[1:3]  # inode and device
        self._of_earlier: dict[bytes, dict[str, bytes]] = {DONE: {}, FOUND: {}, LOST: {}, FAILED: {}}

    # The parent's side.

    def start_child(self) -> None:
        """Before each fork. A record that was cut short by the death of its writer is dropped."""
        *_, end = 0, *(at + length for _, _, at, length in self._records())
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, end)
        self._append(CHILD, "")

    @property
    def begun(self) -> str | None:
        """The key that the last child was working on: begun, and neither done nor lost."""
        keys: list[str] = []
        for kind, key, _, _ in self._records():
            if kind == CHILD:
                keys = []
            elif kind == BEGUN:
                keys.append(key)
            elif kind in (DONE, LOST):
                keys = [other for other in keys if other != key]
        return keys[-1] if keys else None

    @property
    def has_outcomes(self) -> bool:
        """Whether a process of this command has judged a key, or found it failing."""
        return any(kind in (DONE, FOUND) and length for kind, _, _, length in self._records())

    @property
    def is_to_tell(self) -> bool:
        """Whether there are outcomes, or files that would stay as an earlier command has left them."""
        return self.has_outcomes or any(kind == WRITES for kind, *_ in self._records())

    # The side of the process that judges.

    def read(self) -> None:
        """Read the records of this command's earlier processes."""
        for kind, key, at, length in self._records():
            if kind in self._of_earlier and length:
                self._of_earlier[kind][key] = os.pread(self._fd, length, at)

    def outcome(self, key: str) -> Any:
        """The outcome of a key that an earlier process has judged, or None."""
        return _unpickled(self._of_earlier[DONE].get(key))

    def report(self, key: str) -> Any:
        """The failing report that an earlier process had found before it died, or None."""
        return _unpickled(self._of_earlier[FOUND].get(key))

    def sentence(self, key: str) -> str | None:
        """How the process that began this key died, or None."""
        content = self._of_earlier[LOST].get(key)
        return None if content is None else content.decode()

    def failure(self, key: str) -> Any:
        """The failure of the rank by which that process died, and the case as JSON; None if it died otherwise."""
        return _unpickled(self._of_earlier[FAILED].get(key))

    def of_earlier(self) -> tuple[list[Any], dict[str, Any], dict[str, str]]:
        """All that earlier processes have left: outcomes, and failing reports and sentences on deaths by their keys."""
        contents = [{key: _unpickled(data) for key, data in self._of_earlier[kind].items()} for kind in (DONE, FOUND)]
        done, found = ({key: content for key, content in each.items() if content is not None} for each in contents)
        return [*done.values()], found, {key: content.decode() for key, content in self._of_earlier[LOST].items()}

    def will_write(self) -> None:
        """The command has files to write, whatever becomes of it."""
        self._append(WRITES, "")

    def begin(self, key: str) -> None:
        self._append(BEGUN, key)

    def done(self, key: str, outcome: Any = None) -> None:
        """An outcome that cannot be pickled is not kept: after a death its key is judged again."""
        self._append(DONE, key, b"" if outcome is None else _pickled(outcome))

    def found(self, key: str, report: Any) -> None:
        """A failing report, before it is made smaller."""
        self._append(FOUND, key, _pickled(report))

    def lose(self, key: str, sentence: str, failure: Any = None) -> None:
        """An earlier process died between the beginning and the end of this key, by the failure of a rank or not."""
        self._append(LOST, key, sentence.encode(errors="backslashreplace"))
        if failure is not None:
            self._append(FAILED, key, _pickled(failure))

    @property
    def _is_open(self) -> bool:
        """Whether no user's code has closed the file, whose number another one may have then."""
        try:
            return os.fstat(self._fd)[1:3] == self._file_id
        except OSError:
            return False

    def _append(self, kind: bytes, key: str, content: bytes = b"") -> None:
        if self._is_full:
            return
        name = key.encode(errors="surrogateescape")
        if not self._is_open:
            self._is_full = True
            return
        end = os.fstat(self._fd).st_size
        data = memoryview(_HEAD.pack(kind, len(name), len(content)) + name + content)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the disk is full: the outcomes are still in the memory of this process
            self._is_full = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)

    def _records(self) -> Iterator[tuple[bytes, str, int, int]]:
        """Kind, key, and the place and length of the content, of each whole record."""
        at, size = 0, os.fstat(self._fd).st_size
        while at + _HEAD.size <= size:
            kind, of_key, of_content = _HEAD.unpack(os.pread(self._fd, _HEAD.size, at))
            at += _HEAD.size
            if at + of_key + of_content > size:
                return
            yield kind, os.pread(self._fd, of_key, at).decode(errors="surrogateescape"), at + of_key, of_content
            at += of_key + of_content


def _pickled(content: Any) -> bytes:
    try:
        return pickle.dumps(content)
    except Exception:  # a user's object in it may raise anything
        return b""


def _unpickled(data: bytes | None) -> Any:
    try:
        return pickle.loads(data) if data else None
    except Exception:
        return None
