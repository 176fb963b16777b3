"""The table of built-in schemes, from their declarations, as HTML for a page: `tables()`."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

from parity_tests.harness import discover
from parity_tests.harness.case import CaseSpec
from parity_tests.harness.declared import Declared
from parity_tests.harness.drawing import one_case
from parity_tests.harness.listing import record

SEEDS = 8  # drawn cases of which the one with the most ranks is shown
MOST = 8  # tensors of a scheme that are shown
STYLE = "white-space: nowrap; vertical-align: top"


def tables() -> str:
    """One table for each folder of tests, and a line for each file that this environment cannot load."""
    parts = []
    for folder, schemes in groupby(discover.built_in(), key=lambda made: Path(made.file).parent.name):
        rows = "".join(row(made) for made in schemes)
        head = "<tr><th>scheme</th><th>specs</th><th>collectives of one case, calls and bytes per rank</th></tr>"
        parts.append(f"<h2>{folder}</h2><div class='table-wrapper'><table class='docutils'>{head}{rows}</table></div>")
    parts += [f"<p>{html.escape(f'{file}: {why}')}</p>" for file, why in discover.left_out().items()]
    return "".join(parts)


def row(made: Declared) -> str:
    told = record(made)
    mesh = ", ".join(f"{axis} {'|'.join(map(str, sizes))}" for axis, sizes in told["mesh"].items())
    module, _, function = told["reference"].rpartition(".")
    name = [made.name, f"mesh: {mesh}", f"reference: {module.removeprefix('jax_ref.')}.{function}", told["file"]]
    specs = [f"{name}  {spec}".strip() for name, spec in told["inputs"].items()]
    if len(specs) > MOST:
        specs = [*specs[:MOST], f"and {len(specs) - MOST} more"]
    specs += [f"-> {spec}" for spec in told["outputs"].values()]
    return f"<tr>{cell(name)}{cell(specs)}{cell([*collectives(made)])}</tr>"


def cell(lines: list[str]) -> str:
    return f"<td style='{STYLE}'>" + "<br>".join(f"<code>{html.escape(line)}</code>" for line in lines) + "</td>"


def collectives(made: Declared) -> Iterator[str]:
    """The declared cost of the case with the most ranks among some that are drawn."""
    if made.cost is None:
        yield "not declared"
        return
    case = max((one_case(made, seed=seed) for seed in range(SEEDS)), key=lambda case: case.world)
    cost = made.cost(case)
    yield f"forward: {of_phase(cost.forward)}"
    yield f"backward: {of_phase(cost.backward)}"
    yield sizes(case)


def of_phase(ops: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{calls} {op} {size:,} B" for op, (calls, size) in ops.items() if calls) or "none"


def sizes(case: CaseSpec) -> str:
    return " ".join(f"{name}={size}" for name, size in {**case.mesh, **case.dims}.items()) + f" {case.dtype}"
