"""The one table of schemes, by module and name."""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Callable

from parity_tests.harness.declare.declared import Declared

TABLE: dict[str, Declared] = {}


def enter(made: Declared, say: Callable[[str], ValueError]) -> None:
    """Put a scheme in the table; the same file, or a notebook cell run again, replaces its own entry.

    One run of a file that declares a name twice is refused: a case knows its scheme by the name alone.
    """
    old = TABLE.get(made.key)
    if old is not None and not _is_cell(old.file):
        if old.file != made.file:
            raise say(f"is already declared in {old.file}:{old.line}")
        if old.line != made.line and (_is_of_one_import(old, made) or _is_defined_twice(made)):
            raise say(f"is defined in line {old.line} and again in line {made.line}; give one another name")
        if _is_of_one_import(old, made):
            raise say(
                f"is declared twice by line {made.line}, as in a loop; "
                "give each function another __name__ before scheme(...) takes it"
            )
    TABLE[made.key] = made


def _is_of_one_import(old: Declared, made: Declared) -> bool:
    """Whether one and the same import of their file declares both: each import of a file has a spec of its own."""
    specs = [each.fn.__globals__.get("__spec__") for each in (old, made)]
    return old.of_module and made.of_module and specs[0] is not None and specs[0] is specs[1]


def _is_defined_twice(made: Declared) -> bool:
    """Whether its file has two functions of that name; one that moved since the last import is not meant."""
    linecache.checkcache(made.file)
    starts = f"def {made.name}("
    return sum(line.startswith(starts) for line in linecache.getlines(made.file)) > 1


def _is_cell(file: str) -> bool:
    return file.startswith("<") or "ipykernel" in file


def lookup(key: str) -> Declared:
    """The scheme of a CaseSpec, importing its module if need be."""
    if key not in TABLE:
        importlib.import_module(key.partition(":")[0])
    return TABLE[key]
