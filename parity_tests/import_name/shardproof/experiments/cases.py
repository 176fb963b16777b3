"""Cases derived from a failing one; each could refute a note about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import without_other_calls
from shardproof.declare.declared import Declared
from shardproof.declare.draws import BY_NAME
from shardproof.draw import size_choices
from shardproof.draw.choosers import even_chooser, seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.endings.raised import none_if_raised
from shardproof.engines.program import Program
from shardproof.report.report import Report
from shardproof.verify_one_case import verify_case

SHAPES_TRIED = 12
MAX_ELEMENTS = 10**5  # over all dims together, or of each tensor
WIDE = 12  # elements along a dim that has one id among many
ORDINARY = (
    "normal",
    *BY_NAME,
    "ties",
    "iota",
    "ones",
)  # kinds of values; kinds without equal or extreme numbers come first
MIN_DIM_SIZE = 3  # along a dim of two elements, every error is at one end or the other


def reports(
    scheme: Declared,
    derived: Iterable[CaseSpec | None],
    wrap_program: Callable[[Program], Callable[..., Any]] | None = None,
) -> Iterator[Report]:
    """Verify the derived cases that exist.

    Skips cases for which a draw, the reference or the cost raises, as the scheme may never draw them.
    """
    for case in derived:
        report = None if case is None else none_if_raised(verify_case)(scheme, case, wrap_program=wrap_program)
        if report is not None:
            yield report


def larger(
    scheme: Declared, case: CaseSpec, seed: int, *, values: bool, place: int = 0, other_sizes: bool = False
) -> CaseSpec | None:
    """The same mesh, dtype and options at larger sizes and another seed; `values` keeps the kinds of values.

    `place` 0 is the largest of the first shapes, any other number indexes twice as many shapes. `other_sizes` prefers
    shapes in which most dims differ from the case.
    """
    new_case = _larger_case(scheme, case, case.scheme_mesh, seed, place, other_sizes=other_sizes)
    if new_case is None:
        return None
    return new_case.replace(values=case.values if values else normal_values(scheme, new_case))


def of_half_masks(scheme: Declared, case: CaseSpec, seed: int) -> CaseSpec | None:
    """Normal values at larger sizes on the same mesh, with masks that keep about half; None without a mask."""
    masks = [name for name, draw in scheme.draws.items() if draw.kind == "mask"]
    new_case = larger(scheme, case, seed, values=False) if masks else None
    if new_case is None:
        return None
    return new_case.replace(values={**new_case.values, **{name: {"kind": "mask", "keep": "half"} for name in masks}})


def on_another_mesh(scheme: Declared, case: CaseSpec, seed: int) -> CaseSpec | None:
    """Normal values at larger sizes on another declared mesh, preferably with at least two ranks on every axis."""
    scheme_mesh = case.scheme_mesh
    meshes = [
        mesh for mesh in size_choices.meshes(scheme, {}, None) if mesh != scheme_mesh and math.prod(mesh.values()) > 1
    ]

    def alike(mesh: Mapping[str, int]) -> tuple[int, int, int]:
        """Number of axes with one rank, number of axes with as many ranks as in the failing case, and ranks."""
        return (
            sum(size == 1 for size in mesh.values()),
            sum(mesh[axis] == scheme_mesh[axis] for axis in mesh),
            math.prod(mesh.values()),
        )

    for mesh in sorted(meshes, key=alike)[:1]:
        new_case = _larger_case(scheme, case, mesh, seed)
        return None if new_case is None else new_case.replace(values=normal_values(scheme, new_case))
    return None


@none_if_raised  # `assume` or a layout allows these options only with sizes that are never drawn
def of_drawn_sizes(scheme: Declared, case: CaseSpec, number: int) -> CaseSpec:
    """Normal values at drawn sizes on the same mesh, with the same dtype and options."""
    fixed = {**case.scheme_mesh, **case.options}
    drawn = draw_case(scheme, even_chooser(number), fixed, dtype=case.dtype, engine=case.engine)
    return drawn.replace(values=normal_values(scheme, drawn))


def on_one_rank(scheme: Declared, case: CaseSpec) -> CaseSpec | None:
    """The same sizes and values on a mesh of one rank, declared or not."""
    mesh = dict.fromkeys(case.scheme_mesh, 1)
    if not size_choices.compatible(scheme, case.dims, mesh, case.options):
        return None
    layouts = {
        key: {**record, "lengths": [sum(record["lengths"])]} if "lengths" in record else record
        for key, record in case.layouts.items()
    }
    return without_other_calls(case.replace(mesh=mesh, layouts=layouts))


@none_if_raised  # a derived size or a layout does not allow it
def of_one_id(scheme: Declared, case: CaseSpec, seed: int, shard: int) -> CaseSpec | None:
    """All ids equal, in the middle of a shard, and wide tensors, so that the elements of one id are a region."""
    by_ids = [arg for arg in scheme.inputs if scheme.draws[arg.name].kind == "ids"]
    if not by_ids:
        return None
    short = {name for arg in by_ids for name in arg.spec.dim_names}
    shape = {}
    for dim in size_choices.free_dims(scheme):
        size, declared = case.dims[dim], scheme.dims.get(dim)
        choices = [other for other in declared or () if isinstance(other, int)]
        shape[dim] = size if dim in short else max(choices) if choices else size * -(-WIDE // max(size, 1))
    fixed = {**case.scheme_mesh, **shape, **case.options}
    new_case = draw_case(scheme, seeded_chooser(seed), fixed, dtype=case.dtype, engine=case.engine, seed=seed)
    ids = {arg.name: {**new_case.values[arg.name], "picks": [[shard, "middle"]]} for arg in by_ids}
    return new_case.replace(
        mesh=case.mesh, values={**normal_values(scheme, new_case), **ids}, conditions=case.conditions
    )


def normal_values(scheme: Declared, case: CaseSpec) -> dict[str, object]:
    """The values of a case, with all floating inputs of the most ordinary kind declared for them.

    That is `normal`, unless the function accepts only other kinds: a mask of ones, positive numbers.
    """
    return {
        name: {"kind": next((kind for kind in ORDINARY if kind in draw.kinds), draw.kinds[0])}
        if (draw := scheme.draws.get(name)) is not None and draw.kind == "float"
        else value
        for name, value in case.values.items()
    }


@none_if_raised
def _larger_case(
    scheme: Declared, case: CaseSpec, mesh: Mapping[str, int], seed: int, place: int = 0, *, other_sizes: bool = False
) -> CaseSpec | None:
    """One of the largest shapes that the mesh can shard; the rest of the case is drawn from the seed."""
    shapes = [
        shape
        for shape in size_choices.shapes(
            scheme, {}, [mesh], SHAPES_TRIED * (1 if place == 0 else 2), case.options, with_pairs=False
        )
        if size_choices.compatible(scheme, shape, mesh, case.options)
    ]
    # The product of many dims is large where no tensor is.
    shapes = [shape for shape in shapes if math.prod(shape.values()) <= MAX_ELEMENTS] or [
        shape for shape in shapes if _largest_tensor(scheme, shape) <= MAX_ELEMENTS
    ]
    if not shapes:
        return None

    def extent(shape: Mapping[str, int]) -> tuple[int, int, int]:
        others = sum(size != case.dims.get(dim) for dim, size in shape.items()) if other_sizes else 0
        return others, min([MIN_DIM_SIZE, *shape.values()]), math.prod(shape.values())

    shapes.sort(key=extent, reverse=True)
    shape = shapes[min(place, len(shapes) - 1)]
    fixed = {**mesh, **shape, **case.options}
    new_case = draw_case(scheme, seeded_chooser(seed), fixed, dtype=case.dtype, engine=case.engine, seed=seed)
    source = case if mesh == case.scheme_mesh else without_other_calls(case)
    return new_case.replace(
        mesh={axis: mesh.get(axis, size) for axis, size in case.mesh.items()}, conditions=source.conditions
    )


def _largest_tensor(scheme: Declared, shape: Mapping[str, int]) -> int:
    """The number of elements of the largest input or output."""
    return max(math.prod(dim.size(shape) for dim in arg.spec.dims) for arg in (*scheme.inputs, *scheme.outputs))
