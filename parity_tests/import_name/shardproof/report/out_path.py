"""Files that a command writes: unwritable paths are rejected before any work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDINGS = (".png", ".svg", ".pdf")  # accepted endings of a figure's file
ALWAYS_FILES = ("figure", "csv")  # a path `-` is a file and not standard output


def check_writable(**paths: str | None) -> None:
    """Check each option's path, as in `json="out.json"`; None and `-` (standard output) are never rejected.

    Errors: ValueError for a missing folder, for a path that is a folder or not writable, and for more than one `-`.
    """
    to_stdout = [f"--{option} -" for option, path in paths.items() if path == "-" and option not in ALWAYS_FILES]
    if len(to_stdout) > 1:
        raise ValueError(f"{' '.join(to_stdout)}: standard output takes one of them; give the other a file")
    for option, path in paths.items():
        if path is None or (path == "-" and option not in ALWAYS_FILES):
            continue
        flag, file = f"--{option.replace('_', '-')}", Path(path)
        if not path or file.is_dir():
            raise ValueError(f"{flag} {path!r} is {'a folder' if path else 'empty'}; give a file")
        if option == "figure" and file.suffix not in ENDINGS:
            raise ValueError(f"{flag} {path} is not a picture; end it in {', '.join(ENDINGS)}")
        if option == "json" and file.suffix != ".json":
            raise ValueError(f"{flag} {path}: a file of JSON ends in .json; without a path it is standard output")
        if option == "html" and file.suffix not in (".html", ".htm"):
            raise ValueError(f"{flag} {path}: a page ends in .html; - is standard output")
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {file.parent}")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise ValueError(f"{flag} {path} may not be written; give another path")


def check_folder(**paths: str | None) -> None:
    """Check each option's folder, which may not exist yet.

    Errors: ValueError for a file, for a folder below a file, and if nothing can be written or created there.
    """
    for option, path in paths.items():
        if path is None:
            continue
        flag = f"--{option.replace('_', '-')}"
        if not path or (Path(path).exists() and not Path(path).is_dir()):
            raise ValueError(f"{flag} {path!r} is {'a file' if path else 'empty'}; give a folder")
        there = Path(path).absolute()
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            raise ValueError(f"{flag} {path}: {there} is a file; give another folder")
        if not os.access(there, os.W_OK):
            raise ValueError(f"{flag} {path}: {there} may not be written; give another folder")


def write_text(path: str, text: str) -> None:
    """Write to a file, or to standard output for `-`."""
    if path == "-":
        print(text)
        return
    with naming(path):
        Path(path).write_text(f"{text}\n")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError raised inside; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
