"""Pictures of specs: the owner of each position of a sharded dim, and the types of the other axes.

The same strips serve as text, for terminals and errors, and as a figure. A rank has the same digit and colour
everywhere, on any axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_ref.layouts import BUILTIN, DIGITS, check_partition, indivisible
from shardproof.declare.spec import Spec
from shardproof.report import colours

if TYPE_CHECKING:
    from shardproof.declare.case import CaseSpec
    from shardproof.declare.declared import Declared

PROMISES = {
    "R": "same value, gradients add up",
    "I": "same value, same gradient",
    "P": "values add up, same gradient",
}
FULL = "whole on every rank"
WIDEST = 96  # positions written one by one; longer strips count runs
MAX_RUNS = 24
STRIPS = (0.32, 0.66)  # left edge and width of the strips in a figure

Layouts = Mapping[str, Callable[[int, int], Sequence[np.ndarray]]]


@dataclass(frozen=True)
class Strip:
    """One sharding: its text, and for each position of the dim the owning rank of its axis."""

    label: str
    owners: np.ndarray

    def __str__(self) -> str:
        if len(self.owners) <= WIDEST:
            return "".join(digit(rank) for rank in self.owners)
        runs = [f"{digit(rank)}*{len(list(run))}" for rank, run in groupby(self.owners)]
        more = len(runs) - MAX_RUNS
        return " ".join(runs[:MAX_RUNS]) + (f" and {more} more runs" if more > 0 else "")


def digit(rank: int) -> str:
    return DIGITS[rank] if rank < len(DIGITS) else "?"


def owner_strips(spec: Spec, sizes: Mapping[str, int], mesh: Mapping[str, int], layouts: Layouts) -> list[Strip]:
    """One strip for each sharding, outermost first; `layouts` by name, or by `dim/axis` for the sharding of one dim.

    Errors: ValueError if a dim cannot be sharded or a custom layout is not a partition.
    """
    strips = []
    for dim in spec.dims:
        size = dim.size(sizes)
        pieces, label = [np.arange(size)], dim.name
        for sharding in dim.shardings:
            label += str(sharding)
            world = mesh[sharding.axis]
            layout = (
                layouts.get(f"{dim.name}/{sharding.axis}") or layouts.get(sharding.layout) or BUILTIN[sharding.layout]
            )
            owners, parts = np.zeros(size, dtype=np.int64), []
            for piece in pieces:
                if sentence := indivisible(dim.name, len(piece), sharding.axis, world, sharding.layout):
                    raise ValueError(sentence)
                by_rank = list(layout(len(piece), world))
                check_partition(sharding.layout, by_rank, len(piece))
                for rank, positions in enumerate(by_rank):
                    local_ids = piece[np.asarray(positions, dtype=np.int64)]  # NumPy makes an empty list float64
                    owners[local_ids] = rank
                    parts.append(local_ids)
            strips.append(Strip(label, owners))
            pieces = parts
    return strips


def strips(spec: Spec, sizes: Mapping[str, int], mesh: Mapping[str, int], layouts: Layouts | None = None) -> str:
    """A line for each sharding and for each type.

    >>> from shardproof.declare.spec import parse
    >>> print(strips(parse("b s/cp:dual_chunk_swap tp=I", ("cp", "tp")), {"b": 2, "s": 16}, {"cp": 4, "tp": 2}))
    s/cp:dual_chunk_swap  0011223333221100
    tp=I                  same value, same gradient
    """
    lines = [(strip.label, str(strip)) for strip in owner_strips(spec, sizes, mesh, layouts or {})]
    lines += [(f"{axis}={letter}", PROMISES[letter]) for axis, letter in spec.types]
    width = max((len(label) for label, _ in lines), default=0)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines) or FULL


def figure(
    specs: Mapping[str, Spec],
    sizes: Mapping[str, int],
    mesh: Mapping[str, int],
    layouts: Callable[[str], Layouts] | None = None,
) -> Any:
    """A matplotlib figure: for each tensor its strips, coloured and labelled by owner, and its types in words.

    `layouts` maps a tensor's name to its layouts.
    """
    from matplotlib.figure import Figure

    rows: list[tuple[str, np.ndarray | str]] = []
    for name, spec in specs.items():
        rows.append((f"{name}:  {spec}".rstrip(), "" if spec.axes or spec.types else FULL))
        rows += [
            (strip.label, strip.owners) for strip in owner_strips(spec, sizes, mesh, layouts(name) if layouts else {})
        ]
        rows += [(f"{axis}={letter}", PROMISES[letter]) for axis, letter in spec.types]
    canvas = Figure(figsize=(9.0, 0.6 + 0.34 * len(rows)), layout="constrained")
    panel = canvas.subplots()
    for height, (label, content) in enumerate(rows):
        is_title = isinstance(content, str) and content in ("", FULL)
        at = 0.0 if is_title else 0.02
        panel.text(at, -height, label, va="center", fontsize=9, family="monospace", weight="bold" if is_title else None)
        if isinstance(content, str):
            panel.text(STRIPS[0], -height, content, va="center", fontsize=9)
        else:
            draw_strip(panel, content, -height, *STRIPS)
    panel.set(xlim=(0, 1), ylim=(-len(rows) + 0.4, 0.6))
    panel.set_axis_off()
    panel.set_title("mesh " + " ".join(f"{axis}={size}" for axis, size in mesh.items()), fontsize=10, loc="left")
    return canvas


def draw_strip(panel: Any, owners: np.ndarray, height: float, left: float = 0.0, width: float = 1.0) -> None:
    """One bar for each run of positions with one owner, from `left` on, with its digit inside if there is room."""
    step = width / max(len(owners), 1)
    for rank, run in groupby(owners.tolist()):
        length, paint = len(list(run)) * step, colours.of_rank(rank)
        panel.barh(height, length, 0.8, left=left, color=paint, edgecolor=colours.ground(), linewidth=0.8)
        if length > 0.012 * width:
            ink = colours.ink(paint)
            panel.text(left + length / 2, height, digit(rank), ha="center", va="center", fontsize=8, color=ink)
        left += length


def scheme_picture(scheme: Declared, case: CaseSpec) -> str:
    """The mesh, then each input and output of a scheme with its strips."""
    lines = ["mesh " + " ".join(f"{axis}={size}" for axis, size in case.mesh.items())]
    for name, spec in _tensors(scheme).items():
        lines.append(f"{name}  {spec}".rstrip())
        text = strips(spec, case.dims, case.mesh, _bound(scheme, case, spec))
        lines += [f"  {line}" for line in text.splitlines()]
    return "\n".join(lines)


def scheme_strips(scheme: Declared, case: CaseSpec) -> list[tuple[str, Spec, list[Strip]]]:
    """Each input and output of a scheme by name, its spec and its strips."""
    return [
        (name, spec, owner_strips(spec, case.dims, case.mesh, _bound(scheme, case, spec)))
        for name, spec in _tensors(scheme).items()
    ]


def scheme_figure(scheme: Declared, case: CaseSpec) -> Any:
    """The strips of `scheme_picture` as a matplotlib figure."""
    tensors = _tensors(scheme)
    return figure(tensors, case.dims, case.mesh, lambda name: _bound(scheme, case, tensors[name]))


def _tensors(scheme: Declared) -> dict[str, Spec]:
    inputs = {arg.name: arg.spec for arg in scheme.inputs}
    return inputs | {f"-> {arg.name}": arg.spec for arg in scheme.outputs}


def _bound(scheme: Declared, case: CaseSpec, spec: Spec) -> Layouts:
    """The layout of each sharding of a spec, with this case's lengths bound, by `dim/axis`."""
    from shardproof.draw.inputs import layout_function, shard_lengths

    return {
        f"{dim.name}/{sharding.axis}": layout_function(
            sharding.layout, shard_lengths(case, dim.name, sharding), scheme.layouts, trusted=True
        )
        for dim in spec.dims
        for sharding in dim.shardings
    }
