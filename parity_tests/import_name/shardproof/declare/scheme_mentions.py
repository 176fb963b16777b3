"""Find the files of a folder that declare schemes by their text, before any file is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "shardproof"


def declares(file: Path) -> bool:
    """Whether a file uses `scheme` of this package, under any name of its imports: `@sp.scheme`, `declare(...)`.

    A file that names both and cannot be parsed counts too: its import reports the syntax error.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    if "@scheme" in text:
        return True
    if "scheme" not in text or PACKAGE not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    packages, functions = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {each.asname or PACKAGE for each in node.names if each.name == PACKAGE}
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            functions |= {each.asname or "scheme" for each in node.names if each.name in ("scheme", "*")}
    return any(name in functions or name in {f"{each}.scheme" for each in packages} for name in _names(tree))


def _names(tree: ast.AST) -> Iterator[str]:
    """The names that the code reads, such as `declare` and `sp.scheme`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
