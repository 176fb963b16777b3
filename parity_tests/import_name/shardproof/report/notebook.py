"""Schemes, cases and ledgers as drawings in a notebook. Ranks load this too, so it loads no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

import numpy as np

from shardproof.declare import conditions
from shardproof.report import colours, picture
from shardproof.report.markup import Child, svg, tag
from shardproof.report.movement_picture import movement
from shardproof.report.page_style import in_notebook

if TYPE_CHECKING:
    from shardproof.declare.case import CaseSpec
    from shardproof.declare.declared import Declared
    from shardproof.engines.ledger import Ledger

WIDE, HIGH = 480.0, 20.0  # width and height of a strip
MAX_RUNS = 256  # most bars of a strip; a strip with more shows the owner of every n-th position


def of_ledger(ledger: Ledger) -> str:
    """The transfers between the ranks of a run."""
    return in_notebook(movement(ledger))


def of_scheme(scheme: Declared) -> str:
    """The specs of a scheme with the strips of one case, on the largest mesh that has a case."""
    from shardproof.report.declared_pictures import pictured_case

    largest: dict[str, Any] = {axis: max(sizes) for axis, sizes in scheme.mesh.items()}
    try:
        case = pictured_case(scheme, largest)
    except ValueError:  # its dims or its `assume` reject that mesh
        case = pictured_case(scheme, {})
    sizes = ", ".join(f"{axis} {' '.join(map(str, tried))}" for axis, tried in scheme.mesh.items())
    head = tag("p", tag("b", scheme.name), f" over {sizes}; below, {_sizes(case.mesh)} with {_sizes(case.dims)}")
    return in_notebook(head, *_tensors(scheme, case))


def of_case(case: CaseSpec) -> str:
    """The choices that define a case, and the strips of its scheme if that is loaded."""
    from shardproof.declare.discover import TABLE

    rows = {
        "mesh": _sizes(case.mesh),
        "dims": _sizes(case.dims),
        "options": _sizes(case.options),
        "values": "; ".join(f"{name}: {value.get('kind', value)}" for name, value in case.values.items()),
        "called": " and ".join(conditions.phrases(case)),
        "engine": f"{case.engine}, {case.dtype}, seed {case.seed}",
    }
    lines = [tag("tr", tag("th", name), tag("td", text)) for name, text in rows.items() if text]
    scheme = TABLE.get(case.scheme)
    tensors = [] if scheme is None else list(_tensors(scheme, case))
    return in_notebook(tag("p", tag("b", case.scheme.rpartition(":")[2])), tag("table", *lines), *tensors)


def strip(owners: np.ndarray) -> Element:
    """One bar for each run of positions with one owner, in its colour and with its number if there is room."""
    runs = 1 + int(np.count_nonzero(np.diff(owners)))
    sampled = owners[:: -(-len(owners) // MAX_RUNS)] if runs > MAX_RUNS else owners
    step, left = WIDE / max(len(sampled), 1), 0.0
    parts: list[Child] = []
    for rank, run in groupby(sampled.tolist()):
        length, paint = len(list(run)) * step, rank % len(colours.RANKS)
        parts.append(tag("rect", x=left, y=0, width=length, height=HIGH, class_=f"cell r{paint}"))
        if length >= 9 * len(str(rank)):
            parts.append(tag("text", str(rank), x=left + length / 2, y=14, class_=f"t{paint}"))
        left += length
    return svg(WIDE, HIGH, *parts, label=f"the owners of {len(owners)} positions")


def _tensors(scheme: Declared, case: CaseSpec) -> Iterator[Element]:
    """Each input and output with its spec, its strips, and the types of its other axes in words."""
    for name, spec, strips in picture.scheme_strips(scheme, case):
        lines = [
            tag("tr", tag("td", tag("code", each.label)), tag("td", tag("div", strip(each.owners), class_="wide")))
            for each in strips
        ]
        lines += [
            tag("tr", tag("td", tag("code", f"{axis}={letter}")), tag("td", picture.PROMISES[letter]))
            for axis, letter in spec.types
        ]
        full_header = [] if lines else [tag("tr", tag("td", picture.FULL, class_="quiet"))]
        yield tag("h3", name, " ", tag("code", str(spec)))
        yield tag("table", *lines, *full_header)


def _sizes(names: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in names.items())
