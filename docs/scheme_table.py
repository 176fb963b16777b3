"""The tables of built-in schemes, from their declarations, as HTML for a page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from shardproof.declare import discover
from shardproof.declare.case import CaseSpec
from shardproof.declare.counted import counted
from shardproof.declare.declared import Declared
from shardproof.declare.scheme_index import entry_of
from shardproof.draw.drawing import one_case
from shardproof.engines.program import Program
from shardproof.implementation.public_names import is_public
from shardproof.judge.side_checks import costs_of_ranks

SEEDS = 8  # drawn cases of which the one with the most ranks is shown
MOST = 8  # tensors of a scheme that are shown


def folder_of(scheme: Declared) -> str:
    return Path(scheme.file).parent.name


def table(folder: str) -> str:
    """The schemes that the tests of one folder declare: those of public functions, and folded those of its parts."""
    of_folder = [scheme for scheme in schemes() if folder_of(scheme) == folder]
    public = [scheme for scheme in of_folder if is_public(scheme.fn)]
    parts = [scheme for scheme in of_folder if scheme not in public]
    text = _table(public) if public else ""
    if parts:
        summary = f"{counted(len(parts), 'scheme')} of parts that are not public"
        text += f"<details><summary>{summary}</summary>{_table(parts)}</details>"
    return text


def _table(of: list[Declared]) -> str:
    head = "<tr><th>scheme</th><th>specs</th><th>collectives of one case, calls and bytes per rank</th></tr>"
    return f"<table class='docutils schemes'>{head}{''.join(map(row, of))}</table>"


def left_out() -> str:
    """A line for each file that the environment of this build cannot load."""
    lines = [f"{file}: {reason}" for file, reason in discover.left_out().items()]
    return "".join(f"<p>Not shown: {html.escape(line)}</p>" for line in lines)


@cache
def schemes() -> tuple[Declared, ...]:
    return tuple(discover.built_in())


def row(scheme: Declared) -> str:
    fields = entry_of(scheme).to_dict()
    mesh = ", ".join(f"{axis} {'|'.join(map(str, sizes))}" for axis, sizes in fields["mesh"].items())
    module, _, function = fields["reference"].rpartition(".")
    name = [scheme.name, f"mesh: {mesh}", f"reference: {module.removeprefix('jax_ref.')}.{function}", fields["file"]]
    specs = [f"{name}  {spec}".strip() for name, spec in fields["inputs"].items()]
    if len(specs) > MOST:
        specs = [*specs[:MOST], f"and {len(specs) - MOST} more"]
    specs += [f"-> {spec}" for spec in fields["outputs"].values()]
    return f"<tr>{cell(name)}{cell(specs)}{cell([*collectives(scheme)])}</tr>"


def cell(lines: list[str]) -> str:
    return "<td>" + "".join(f"<code>{breakable(line)}</code>" for line in lines) + "</td>"


def breakable(line: str) -> str:
    """The line as HTML, which may break after a dot, an underscore or a slash of a long name."""
    return re.sub(r"(?<=\w[._/])(?!py:)(?=\w)", "<wbr>", html.escape(line))


def collectives(scheme: Declared) -> Iterator[str]:
    """The declared cost of the case with the most ranks among some that are drawn, on its first rank."""
    if scheme.cost is None:
        yield "not declared"
        return
    case = max((one_case(scheme, seed=seed) for seed in range(SEEDS)), key=lambda case: case.world)
    costs = costs_of_ranks(scheme, case, Program.of(scheme))
    unlike = " of rank 0" if any(cost != costs[0] for cost in costs) else ""
    yield f"forward{unlike}: {of_phase(costs[0].forward)}"
    yield f"backward{unlike}: {of_phase(costs[0].backward)}"
    yield sizes(case)


def of_phase(ops: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{calls} {op} {size:,} B" for op, (calls, size) in ops.items() if calls) or "none"


def sizes(case: CaseSpec) -> str:
    return " ".join(f"{name}={size}" for name, size in {**case.mesh, **case.dims}.items()) + f" {case.dtype}"
