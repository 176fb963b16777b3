"""The table of schemes: a user's files are imported, the built-in ones come from the index without torch and JAX."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Sequence
from fnmatch import fnmatch

from rich.console import Console
from rich.table import Table

from shardproof.declare import scheme_index
from shardproof.declare.targets import is_path
from shardproof.report.out_path import check_writable, write_text
from shardproof.report.sentence import Sentence

TABLE_WIDTH = 160  # columns that need no line break in any cell; without a terminal, COLUMNS gives them


def show(target: str, json: str | None, quiet: bool = False, everything: bool = False) -> None:
    """Print the schemes of a file or folder, or the public built-in ones with a matching name; all if `everything`.

    Prints only names if `quiet`. Errors: UnusableTarget if there is none.
    """
    check_writable(json=json)
    entries = _of_path(target) if is_path(target) else _built_in(target, everything)
    if json:
        write_text(json, json_module.dumps([entry.to_dict() for entry in entries], indent=2))
    if json == "-":
        return
    if quiet:
        print("\n".join(entry.name for entry in entries))
        return
    console = Console()
    if console.width < TABLE_WIDTH:
        console.print(Sentence("\n\n".join(map(_stacked, entries))), soft_wrap=True)
    else:
        console.print(_table(entries), highlight=False)


def _of_path(target: str) -> list[scheme_index.Entry]:
    from shardproof.declare import discover

    return [scheme_index.entry_of(scheme) for scheme in discover.find([target])]


def _built_in(pattern: str, everything: bool) -> list[scheme_index.Entry]:
    schemes = scheme_index.entries()
    named = [entry for entry in schemes if fnmatch(entry.name, pattern)] or [
        entry for entry in schemes if any(fnmatch(name, pattern) for name in _functions(entry))
    ]
    if not named and not set(pattern) & set("*?["):
        named = [entry for entry in schemes if all(_has(entry, word) for word in pattern.lower().split())]
    entries = [entry for entry in named if everything or entry.public]
    if not entries:
        from shardproof.declare import discover

        if named:
            raise discover.UnusableTarget(f"{pattern}: no public scheme of this name; --all shows the others")
        names = [name for entry in schemes for name in (entry.name, *_functions(entry))]
        hint = discover.nearest(pattern, names)
        raise discover.UnusableTarget(f"{pattern}: no scheme of this name{hint} (shardproof list --all shows all)")
    return entries


def _has(entry: scheme_index.Entry, word: str) -> bool:
    """Whether a word in lower case is in a name, or begins a word of a text."""
    begins = re.compile(rf"\b{re.escape(word)}")
    in_names = any(word in name.lower() for name in (entry.name, *entry.verifies))
    return in_names or any(begins.search(text.lower()) for text in entry.search_texts)


def _functions(entry: scheme_index.Entry) -> list[str]:
    """The functions that a scheme verifies, with and without their package."""
    return [*entry.verifies, *(function.rpartition(".")[2] for function in entry.verifies)]


def _stacked(entry: scheme_index.Entry) -> str:
    """A scheme on its own lines, for narrow terminals and pipes: no table breaks its specs and paths."""
    mesh = "  ".join(f"{axis}: {', '.join(map(str, sizes))}" for axis, sizes in entry.mesh.items())
    return "\n  ".join([entry.name, mesh, *_specs(entry), *_names(entry)])


def _specs(entry: scheme_index.Entry) -> list[str]:
    inputs = [f"{name}  {spec}" for name, spec in entry.inputs.items()]
    return [*inputs, *(f"-> {spec}" for spec in entry.outputs.values())]


def _names(entry: scheme_index.Entry) -> list[str]:
    verified = [f"verifies   {function}" for function in entry.verifies]
    module, _, name = entry.reference.rpartition(".")
    reference = f"{name}, in this file" if module == entry.key.partition(":")[0] else entry.reference
    return [*verified, f"reference  {reference}", f"file       {entry.file}:{entry.line}"]


def _table(entries: Sequence[scheme_index.Entry]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("scheme", "mesh", "specs", "function, reference and file"):
        table.add_column(column, overflow="fold", no_wrap=column == "scheme")
    for entry in entries:
        mesh = "\n".join(f"{axis}: {', '.join(map(str, sizes))}" for axis, sizes in entry.mesh.items())
        table.add_row(
            entry.name,
            mesh,
            "\n".join(_specs(entry)),
            "\n".join(_names(entry)),
            end_section=True,
        )
    return table
