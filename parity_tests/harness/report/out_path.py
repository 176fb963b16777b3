"""Files that a command writes: paths that cannot be written are rejected before any work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDINGS = (".png", ".svg", ".pdf")  # of a figure
ALWAYS_FILES = ("figure", "csv")  # where `-` is not standard output


def check_writable(**paths: str | None) -> None:
    """Each option with its path: `json="out.json"`; None and `-`, which is standard output, are never rejected.

    Errors: ValueError for a folder that does not exist, for a path that is a folder or may not be written, and for
    standard output more than once.
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
            raise ValueError(f"{flag} {path} is no picture; end it in {', '.join(ENDINGS)}")
        if option == "json" and file.suffix != ".json":
            raise ValueError(f"{flag} {path}: a file of JSON ends in .json; without a path it is standard output")
        if option == "html" and file.suffix not in (".html", ".htm"):
            raise ValueError(f"{flag} {path}: a page ends in .html; - is standard output")
        folder = file.absolute().parent
        if not folder.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {file.parent}")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise ValueError(f"{flag} {path}: may not be written; give another path")


def check_folder(**paths: str | None) -> None:
    """Each option with the folder that it names, which need not be there yet.

    Errors: ValueError for a file, for a folder below one, and where nothing may be written or made.
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
    """To a file, or to standard output for `-`."""
    if path == "-":
        print(text)
        return
    with naming(path):
        Path(path).write_text(f"{text}\n")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds the path to an OSError raised inside: that of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
