"""Names that a package loads when they are used: the imports of its stub, which type checkers and editors read too."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_in(stub: Path) -> dict[str, tuple[str, str]]:
    """Each name that a stub imports, with its module and its name there."""
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (node.module or "", alias.name) for node in imports for alias in node.names}


def loader(package: str, names: dict[str, tuple[str, str]]) -> Callable[[str], Any]:
    """The `__getattr__` of a package with these names."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            known = ", ".join(sorted(names))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {known}")
        module, attribute = names[name]
        home = import_module(module)
        return vars(home)[attribute] if attribute in vars(home) else import_module(f"{module}.{attribute}")

    return __getattr__
