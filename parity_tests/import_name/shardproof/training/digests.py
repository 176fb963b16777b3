"""Checksums of a checkpoint's files: written after the files, and verified before any file is used.

The file `sha256` has the format of `sha256sum`, so `sha256sum -c sha256` verifies the files too. The marker `done` is
written last. It has three lines: the content, the checksum of `sha256`, and the checksum of the first two lines.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

DONE, LIST = "done", "sha256"


class Damage(ValueError):
    """A file of a checkpoint differs from the saved file. `remedy` is an alternative to using another checkpoint."""

    def __init__(self, path: Path, problem: str, remedy: str = "restore the file") -> None:
        super().__init__(f"{path} {problem}")
        self.remedy = remedy


def write(folder: Path, content: str) -> None:
    """Write the checksums of all files in the folder, then the marker with `content` as its first line."""
    listed = "".join(f"{_digest(path)}  {path.name}\n" for path in sorted(folder.iterdir()))
    _write(folder / LIST, listed)
    lines = f"{content}\n{_sha256(listed.encode())}\n"
    _write(folder / f"{DONE}.part", f"{lines}{_sha256(lines.encode())}\n")
    os.replace(folder / f"{DONE}.part", folder / DONE)  # atomic: a killed run leaves no partial marker
    _synchronise(folder)


def verified_content(folder: Path) -> str:
    """Verify every file of the folder, and return the marker's content.

    Errors: Damage for the first file that is truncated, changed, missing, unlisted or unreadable.
    """

    # 1. The last line of the marker is the checksum of the lines before it.
    marker = folder / DONE
    data = _read(marker)
    lines, digest = data[:-65], data[-65:]
    if digest != f"{_sha256(lines)}\n".encode():
        raise Damage(marker, "is truncated or changed, or of a version that wrote no checksums")
    content, list_digest, _ = lines.decode().rsplit("\n", 2)
    # 2. The marker has the checksum of the list, and the list has the checksums of all other files.
    listed = _read(folder / LIST)
    if _sha256(listed) != list_digest:
        raise Damage(folder / LIST, _changed(_sha256(listed), list_digest))
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in listed.decode().splitlines())}
    # 3. An unlisted file is left from another save, so the folder may be a mixture of two checkpoints.
    for name in sorted(path.name for path in folder.iterdir()):
        if name not in {*digests, DONE, LIST}:
            raise Damage(folder / name, "is not a file of this checkpoint", "remove it")
    for name, digest in digests.items():
        if (actual := _digest(folder / name)) != digest:
            raise Damage(folder / name, _changed(actual, digest))
    return content


def _changed(actual: str, written: str) -> str:
    return f"is truncated or changed: its SHA-256 is {actual[:8]}..., {written[:8]}... was written"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _digest(path: Path) -> str:
    """The SHA-256 of a file of any size."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> Damage:
    return Damage(path, "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}")


def _write(path: Path, text: str) -> None:
    """Write a file and flush it to the disk, before the next file is written."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _synchronise(folder: Path) -> None:
    """Flush the folder's file names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
