"""Targets of the command: paths, and names or globs of built-in schemes. This file imports nothing slow."""

from __future__ import annotations

from pathlib import Path


def is_path(target: str) -> bool:
    """Whether a target is a file, `file.py::name` or a folder, and so no name or glob of built-in schemes."""
    path = Path(target)
    return "::" in target or path.suffix == ".py" or path.is_dir() or path.is_file()
