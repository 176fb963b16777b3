"""Targets of the command: paths, and names or globs of built-in schemes, and the errors of unusable ones.

This file imports nothing slow.
"""

from __future__ import annotations

from pathlib import Path

from shardproof.endings.exit_status import RANK_FAILED


def is_path(target: str) -> bool:
    """Whether a target is a file, `file.py::name` or a folder, and so no name or glob of built-in schemes."""
    path = Path(target)
    return "::" in target or path.suffix == ".py" or path.is_dir() or path.is_file()


def absolute(target: str) -> str:
    """`file.py::name` with the full path of its file, since a rank may be in another folder."""
    file, _, name = target.partition("::")
    return f"{Path(file).resolve()}::{name}"


class UnusableTarget(Exception):
    """A target that names no scheme, or a file that cannot be imported; the message is for users."""


class NoScheme(UnusableTarget):
    """A file that declares no scheme."""


class LeftImport(UnusableTarget):
    """The import of a file exits, or ended an earlier process of this command; the message names the line."""

    status = RANK_FAILED

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class BrokenImport(UnusableTarget):
    """A file whose import raises; the message names the line."""


class NeedsExtra(UnusableTarget):
    """A file that needs a package which is not installed; the message names the extra."""
