"""Files that a command writes: refused before any work where they cannot be."""

from __future__ import annotations

import os
from pathlib import Path


def refuse_unwritable(**paths: str | None) -> None:
    """Each option with its path: `json="out.json"`; None and `-`, which is standard output, are never refused.

    Errors: ValueError for a folder that there is not, and for what is a folder or may not be written.
    """
    for option, path in paths.items():
        if path is None or path == "-":
            continue
        flag, file = f"--{option.replace('_', '-')}", Path(path)
        if not path or file.is_dir():
            raise ValueError(f"{flag} {path!r} is a folder; give a file")
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {file.parent}")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise ValueError(f"{flag} {path}: may not be written; give another path")


def write_text(path: str, text: str) -> None:
    """To a file, or to standard output for `-`."""
    if path == "-":
        print(text)
    else:
        Path(path).write_text(f"{text}\n")
