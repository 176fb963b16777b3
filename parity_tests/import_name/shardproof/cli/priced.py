"""Output of `shardproof cost`: the declared cost of schemes on one or several meshes, as text or JSON."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.cost import exchanges, sheet, sweep, table
from shardproof.cost.candidates import Comparison, Setting, candidates
from shardproof.declare import discover
from shardproof.declare.case import DTYPES
from shardproof.declare.declared import Declared
from shardproof.report.out_path import check_writable, naming, write_text


@dataclass(frozen=True)
class Request:
    """The options of the command, as typed."""

    mesh: Sequence[str]
    dims: Sequence[str]
    options: Mapping[str, Any]
    dtype: str | None
    seed: int | None
    links: str


def show(targets: Sequence[str], request: Request, json: str | None, figure: str | None = None) -> None:
    """Print the cost of the targets. Errors: UnusableTarget, ValueError."""
    check_writable({"--links": request.links}, figure=figure, json=json)
    comparisons = compare(targets, request)
    if figure:
        from shardproof.cost.figure import figure as drawn

        with naming(figure):
            drawn(comparisons, " ".join([*targets, *request.mesh, *request.dims])).savefig(figure)
    if json:
        write_text(json, json_module.dumps(table.as_json(comparisons), indent=1))
    if json != "-":
        print(table.one_mesh(comparisons[0]) if len(comparisons) == 1 else table.several_meshes(comparisons))


def compare(targets: Sequence[str], request: Request) -> list[Comparison]:
    """A comparison of the targets for each mesh."""
    if request.dtype is not None and request.dtype not in DTYPES:
        raise ValueError(f"--dtype {request.dtype!r} is not one of {', '.join(DTYPES)}")
    meshes, dims, links = sweep.meshes(request.mesh), sweep.rules(request.dims), sheet.read(request.links)
    words = [target for target in targets if target in exchanges.COMPARISONS]
    if words and len(targets) > 1:
        raise ValueError(f"{words[0]} is already a comparison of schemes; give it alone")
    schemes = [] if words else discover.find(list(targets))
    comparisons = []
    for mesh in meshes:
        names = {**sweep.sizes_on(mesh, dims), **request.options}
        setting = Setting(mesh, names, links, request.dtype, request.seed)
        comparisons.append(exchanges.compared(words[0], setting) if words else _candidates_of_all(schemes, setting))
    if not any(comparison.candidates for comparison in comparisons):
        reasons = dict.fromkeys(f"{name}: {reason}" for one in comparisons for name, reason in one.left_out.items())
        raise ValueError("; ".join(reasons))
    return comparisons


def _candidates_of_all(schemes: Sequence[Declared], setting: Setting) -> Comparison:
    """The candidates of all schemes; for a single scheme, its error is raised."""
    if len(schemes) == 1:
        return candidates(schemes[0], setting)
    comparison = Comparison(setting)
    for scheme in schemes:
        exchanges.join(comparison, scheme, setting, scheme.name)
    return comparison
