"""The table of built-in schemes, from the index alone: torch and JAX are not imported for it."""

from __future__ import annotations

import json as json_module
from fnmatch import fnmatch

from rich.console import Console
from rich.table import Table

from parity_tests.harness.declare import scheme_index
from parity_tests.harness.report.out_path import check_writable, write_text

WIDEST = 400  # where there is no terminal, lines are as long as they must be


def show(pattern: str, json: str | None, quiet: bool = False) -> None:
    """Print the built-in schemes whose name matches, names alone if `quiet`. Errors: UnusableTarget where none does."""
    check_writable(json=json)
    everything = scheme_index.entries()
    entries = [entry for entry in everything if fnmatch(entry.name, pattern)]
    if not entries:
        from parity_tests.harness.declare import discover

        hint = discover.nearest(pattern, [entry.name for entry in everything])
        raise discover.UnusableTarget(f"{pattern}: no scheme of this name{hint} (shardproof list shows all)")
    if json:
        write_text(json, json_module.dumps([entry.to_dict() for entry in entries], indent=2))
    if json == "-":
        return
    if quiet:
        print("\n".join(entry.name for entry in entries))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("scheme", "mesh", "specs", "reference and file"):
        table.add_column(column, overflow="fold", no_wrap=column == "scheme")
    for entry in entries:
        mesh = "\n".join(f"{axis}: {', '.join(map(str, sizes))}" for axis, sizes in entry.mesh.items())
        inputs = [f"{name}  {spec}" for name, spec in entry.inputs.items()]
        specs = "\n".join([*inputs, *(f"-> {spec}" for spec in entry.outputs.values())])
        table.add_row(entry.name, mesh, specs, f"{entry.reference}\n{entry.file}:{entry.line}", end_section=True)
    Console(width=None if Console().is_terminal else WIDEST).print(table, highlight=False)
