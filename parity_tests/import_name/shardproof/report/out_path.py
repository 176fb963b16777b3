"""Files that a command writes: unwritable paths are rejected before any work, and none is lost to half of another."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENDINGS = (".png", ".svg", ".pdf")  # accepted endings of a figure's file
ALWAYS_FILES = ("figure", "csv")  # a path `-` is a file and not standard output


def check_writable(inputs: Mapping[str, str | None] | None = None, /, **paths: str | None) -> None:
    """Check each option's path, as in `json="out.json"`; None and `-` (standard output) are never rejected.

    `inputs` are the files that the command reads, by how a sentence names them: none may be replaced.

    Errors: ValueError for a missing folder, for a path that is a folder or not writable, for more than one `-`, for `-`
    where standard output is closed, for two options with the same file, and for an
    input.
    """
    to_stdout = [f"--{option} -" for option, path in paths.items() if path == "-" and option not in ALWAYS_FILES]
    if len(to_stdout) > 1:
        raise ValueError(f"{' '.join(to_stdout)}: standard output takes one of them; give the other a file")
    if to_stdout and sys.stdout is None:
        raise ValueError(f"{to_stdout[0]}: standard output is closed; give a file")
    files = {option: os.path.realpath(path) for option, path in paths.items() if path and path != "-"}
    for option, file in files.items():
        same = next((other for other in files if other != option and files[other] == file), None)
        if same is not None and not file.startswith("/dev/"):
            raise ValueError(f"--{option} and --{same} are both {paths[option]}; give each a file of its own")
        read = next((name for name, path in (inputs or {}).items() if path and os.path.realpath(path) == file), None)
        if read is not None and not file.startswith("/dev/"):
            raise ValueError(f"--{option} and {read} are both {paths[option]}; give each a file of its own")
    for option, path in paths.items():
        if path is None or (path == "-" and option not in ALWAYS_FILES):
            continue
        flag, file = f"--{option.replace('_', '-')}", Path(path)
        if not path or file.is_dir():
            raise ValueError(f"{flag} {path!r} is {'a folder' if path else 'empty'}; give a file")
        if _is_loop(file):
            raise ValueError(f"{flag} {path}: is a loop of symbolic links; give another path")
        if file.is_fifo() and not file.resolve().is_relative_to("/proc"):  # not >(command) of a shell
            raise ValueError(f"{flag} {path}: is a named pipe; give a file, or - for standard output")
        if file.suffix == ".py" and file.exists():
            raise ValueError(f"{flag} {path}: is a Python file, which would be replaced; give another path")
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


def _is_loop(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def write_texts(texts: Mapping[str, Callable[[], str]]) -> None:
    """Write each text to its path, also after one could not be written, whose error is then raised."""
    errors: list[OSError] = []
    for path, text in texts.items():
        try:
            write_text(path, text())
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def write_text(path: str, text: str) -> None:
    """Write to a file, or to standard output for `-`. A file is written beside and renamed, so it is never half new."""
    if path == "-":
        sys.stdout.write(f"{text}\n")  # a user's code may have replaced `print`
        return
    data = f"{text}\n".encode(errors="backslashreplace")
    with naming(path):
        file = Path(path).resolve()
        if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):
            Path(path).write_bytes(data)  # a device, or a file in a folder that takes no other
            return
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            beside.write_bytes(data)
            if file.exists():
                shutil.copymode(file, beside)
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError raised inside; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        path = Path(path)
        here = path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
        error.filename = error.filename or str(here)
        raise
