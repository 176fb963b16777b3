"""The long case of a scheme: one dim is so long that a running sum in bfloat16 stops growing.

bfloat16 has 8 bits. From 256 on its numbers are 2 or more apart, so adding a number below 1 changes nothing. All
numbers of a long case lie between 1/2 and 1. A sum of LEAST of them is about 384, and a running sum in bfloat16 stays
at 256: an error of a third, which exceeds any budget, however many roundings a scheme declares. And one rounding too
many, which may hide in a few numbers, shows in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import COTANGENT
from shardproof.declare.declared import Declared
from shardproof.declare.draws import ALIKE
from shardproof.declare.spec import size_of
from shardproof.draw import size_choices
from shardproof.draw.choosers import even_chooser
from shardproof.draw.drawing import draw_case, fitting_meshes

DTYPE = "bfloat16"
LEAST, MOST = 512, 1024  # numbers along the long dim
ELEMENTS = 2**14  # the most in one tensor; a reference keeps several of this size, in nine directions


def long_case(scheme: Declared, fixed: Mapping[str, Any], seed: int) -> CaseSpec | None:
    """A case with a long sum, on a few ranks; None without bfloat16, or if no free dim is summed over."""
    meshes = fitting_meshes(scheme, fixed) if DTYPE in scheme.dtypes else []
    for name in _summed_dims(scheme, fixed):
        for mesh in sorted(meshes, key=_order):
            shape = next(_shapes(scheme, fixed, mesh, name), None)
            if shape is not None:
                sizes = {**fixed, **mesh, **{dim: shape[dim] for dim in size_choices.free_dims(scheme)}}
                return _alike(scheme, draw_case(scheme, even_chooser(1, seed), sizes, dtype=DTYPE))
    return None


def _order(mesh: Mapping[str, int]) -> tuple[bool, int, bool, int]:
    """Two to six ranks come first, over many axes, with an axis of three if possible: a mean over three is rounded."""
    world, sizes = math.prod(mesh.values()), list(mesh.values())
    return world not in range(2, 7), sizes.count(1), 3 not in sizes, world


def _summed_dims(scheme: Declared, fixed: Mapping[str, Any]) -> list[str]:
    """Dims of any size that an output or a gradient sums over, as it lacks them; dims that the most lack come first.

    A reduction's dim that an output has too, such as the rows of attention, is left out: it needs memory for all pairs.
    """
    tensors = [arg for arg in (*scheme.inputs, *scheme.outputs) if arg.differentiable]
    free = [name for name in size_choices.free_dims(scheme) if name not in scheme.dims and name not in fixed]
    pair_dims = {name for output in scheme.outputs for name in output.spec.dim_names} & set(scheme.reduction or ())
    lacking = {name: sum(name not in arg.spec.dim_names for arg in tensors) for name in free if name not in pair_dims}
    return sorted((name for name, count in lacking.items() if count), key=lambda name: -lacking[name])


def _shapes(scheme: Declared, fixed: Mapping[str, Any], mesh: Mapping[str, int], name: str) -> Iterator[dict[str, int]]:
    """Shapes with a long dim on a mesh, the longest first, and of these the one with the largest other sizes."""
    unit = size_choices.units_of(scheme, mesh)
    given = {key: size for key, size in fixed.items() if key not in scheme.all_options}
    step = unit.get(name, 1)
    for size in (MOST, LEAST):
        long = math.ceil(size / step) * step
        sizes, turns = {**given, **mesh, name: long}, range(1, size_choices.TURNS)
        drawn = [size_choices.shape_of_turn(scheme, sizes, unit, turn) for turn in turns]
        shapes = [shape for shape in drawn if shape is not None and _largest(scheme, shape) <= ELEMENTS]
        shapes.sort(key=lambda shape: -math.prod(shape.values()))
        yield from (shape for shape in shapes if size_choices.compatible(scheme, shape, mesh))


def _largest(scheme: Declared, shape: Mapping[str, int]) -> int:
    tensors = (*scheme.inputs, *scheme.outputs)
    return max(math.prod(size_of(dim, shape) for dim in arg.spec.dim_names) for arg in tensors)


def _alike(scheme: Declared, case: CaseSpec) -> CaseSpec:
    """The case with numbers between 1/2 and 1 for inputs that may be any numbers, and for all cotangents."""
    free_floats = [name for name, draw in scheme.draws.items() if draw.kind == "float" and "normal" in draw.kinds]
    cotangents = [COTANGENT + arg.name for arg in scheme.outputs if arg.differentiable]
    return case.replace(values={**case.values, **{name: {"kind": ALIKE} for name in (*free_floats, *cotangents)}})
