"""Modules beside a file of schemes, which Python keeps by their names: two folders may each have a `helper.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from shardproof.declare import travel


def check_own_modules(path: Path, folder: Path) -> None:
    """ImportError if a file, or a module of its folder, imports a name that an earlier file has taken for its own.

    It would get the module of the other folder without a word, and its schemes would be judged with that one.
    """
    taken = {name for name in travel.IMPORTED_WITH_SCHEMES if name in sys.modules and not is_beside(name, folder)}
    waiting, seen = [path], {path}
    while taken and waiting:
        for name in _imports(waiting.pop()):
            own = next(
                (file for file in (folder / f"{name}.py", folder / name / "__init__.py") if file.is_file()), None
            )
            if own is not None and name in taken:
                raise ImportError(
                    f"another module {name!r} is already imported, {sys.modules[name].__file__}; verify the two by "
                    "commands of their own, or rename one"
                )
            if own is not None and own not in seen:
                seen.add(own)
                waiting.append(own)


def is_beside(name: str, folder: Path) -> bool:
    """Whether a module lies in a folder or below it, and is not installed there."""
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder) and "site-packages" not in file


def _imports(file: Path) -> Iterator[str]:
    """The first names of all modules that a file imports; none if Python cannot parse it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
