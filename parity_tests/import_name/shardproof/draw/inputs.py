"""Arrays of one case: full inputs and cotangents, their shards, and the addends of partial values.

All arrays depend only on the case (NumPy Philox keyed by seed and name), so every rank and the reference build the same
bits without communication. Arrays are sharded by the reference's layouts, never by production's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import Generator, Philox

import jax_ref.layouts as trusted_layouts
import torch_impl.layouts as production_layouts
from shardproof.declare.case import CaseSpec
from shardproof.declare.conditions import COTANGENT, dtype_of
from shardproof.declare.draws import ALIKE, UNEVEN, Draw, alike, with_border
from shardproof.declare.spec import Dim, Sharding
from shardproof.draw import custom_layout

if TYPE_CHECKING:
    from shardproof.declare.declared import Argument

Layouts = Mapping[str, Callable[..., Any]]
# The gradient type whose axes split a value into addends: P for inputs; its dual R for cotangents.
ADDEND_TYPE = {"input": "P", "cotangent": "R"}


def generator(case: CaseSpec, name: str) -> Generator:
    return Generator(Philox(key=[case.seed & (2**64 - 1), zlib.crc32(name.encode())]))


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array rounded to `dtype`, as float64."""
    tensor = torch.tensor(array, device="cpu")  # whatever default device the file of the scheme has set
    return tensor.to(getattr(torch, dtype)).double().numpy()


def full_array(arg: Argument, draw: Draw, case: CaseSpec) -> np.ndarray:
    """The full input before it is split into addends: float64 values of the tested dtype, int64 or bool."""
    name = _source(arg.name, case)
    value = case.values.get(name, {})
    array = draw.build(value, arg.shape(case), generator(case, name), case)
    if "border" in value:
        array = with_border(array, value["border"], arg.spec.dim_names, case, draw.full_rows)
    if value.get("keep") in UNEVEN:
        array = uneven_rows(arg, value["keep"], value.get("shard", 0), case)
    if draw.ignore is not None and value.get("ignored", "none") != "none":
        is_ignored = uneven_rows(arg, value["ignored"], value.get("shard", 0), case)
        numbers = np.atleast_1d(np.asarray(draw.ignore, dtype=np.int64))
        array = np.where(is_ignored, generator(case, f"ignored {name}").choice(numbers, array.shape), array)
    if array.shape != arg.shape(case):
        raise ValueError(f"case: input '{arg.name}' is {array.shape}, '{arg.spec}' says {arg.shape(case)}")
    if arg.name in case.conditions.get("expanded", ()):
        array = np.broadcast_to(array[:1], array.shape).copy()
    elif draw.nan_rows is not None and value.get("padding") == "nan":
        array = np.where(draw.nan_rows(case, array.shape)[..., None], np.nan, array)
    return array if arg.is_integer else rounded(array, dtype_of(case, arg.name))


def uneven_rows(arg: Argument, pattern: str, shard: int, case: CaseSpec) -> np.ndarray:
    """Where a pattern is true: one of UNEVEN, or "half", which is true at random.

    "shard" is true at the positions of a sharded dim that one rank holds, and the number `shard` selects dim and rank;
    "others" is true at all other positions. Without a sharded dim both are like "prefix": a prefix of each row.
    """
    shape = arg.shape(case)
    rng = generator(case, f"rows of {_source(arg.name, case)}")
    if pattern == "half":
        return rng.random(shape) < 0.5
    axes = [axis for axis, dim in enumerate(arg.spec.dims) if dim.shardings and not _has_custom_layout(dim)]
    if pattern == "prefix" or not axes:
        rows = np.arange(shape[-1]) if shape else np.zeros((), np.int64)
        return np.broadcast_to(rows < rng.integers(0, shape[-1] + 1 if shape else 2, (*shape[:-1], 1)), shape).copy()
    axis = axes[shard % len(axes)]
    dim, ranks = arg.spec.dims[axis], coordinates(case.mesh)
    held = _dim_positions(dim, shape[axis], case, ranks[shard // len(axes) % len(ranks)], {})
    inside = np.isin(np.arange(shape[axis]), held) == (pattern == "shard")
    return np.broadcast_to(inside.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape).copy()


def _has_custom_layout(dim: Dim) -> bool:
    return any(not hasattr(trusted_layouts, sharding.layout) for sharding in dim.shardings)


def cotangent(
    arg: Argument, case: CaseSpec, nan_rows: Callable[[CaseSpec, tuple[int, ...]], np.ndarray] | None = None
) -> np.ndarray:
    """The cotangent of an output: NaN in the rows that are not read, if the case asks for that."""
    array = _numbers_of_cotangent(arg, case)
    if nan_rows is None or arg.name not in case.conditions.get("nan_cotangents", ()):
        return array
    rows = np.asarray(nan_rows(case, array.shape))
    return np.where(rows.reshape(*rows.shape, *(1,) * (array.ndim - rows.ndim)), np.nan, array)


def direction(arg: Argument, case: CaseSpec) -> np.ndarray:
    """A random direction of an input, along which its gradient is differentiated again."""
    return rounded(generator(case, f"direction {arg.name}").standard_normal(arg.shape(case)), case.dtype)


def _numbers_of_cotangent(arg: Argument, case: CaseSpec) -> np.ndarray:
    """A random cotangent for an output, rounded to the tested dtype: one number if expanded, zeros if unused."""
    if arg.name in case.conditions.get("unused", ()):
        return np.zeros(arg.shape(case))
    if COTANGENT + arg.name in case.conditions.get("expanded", ()):
        one = generator(case, f"cotangent {arg.name}").standard_normal(())
        return np.full(arg.shape(case), rounded(np.asarray(one), case.dtype))
    rng, shape = generator(case, f"cotangent {arg.name}"), arg.shape(case)
    is_alike = case.values.get(COTANGENT + arg.name, {}).get("kind") == ALIKE
    return rounded(alike(rng, shape) if is_alike else rng.standard_normal(shape), case.dtype)


# Ranks of lockstep and the reference need the same arrays for the judged case and for its other calls. They share one
# array, which must not be written to.
_RECENT: dict[int, tuple[CaseSpec, dict[Any, tuple[Any, np.ndarray]]]] = {}
MOST_RECENT = 4


def once_for_case(case: CaseSpec, key: Any, source: Any, build: Callable[[], np.ndarray]) -> np.ndarray:
    """The result of `build`, called once per case object, key and source object."""
    entry = _RECENT.pop(id(case), None) or (case, {})
    _RECENT[id(case)] = entry
    if len(_RECENT) > MOST_RECENT:
        _RECENT.pop(next(iter(_RECENT)), None)
    arrays = entry[1]
    if key not in arrays or arrays[key][0] is not source:
        array = build()
        array.setflags(write=False)
        arrays[key] = source, array
    return arrays[key][1]


def _source(name: str, case: CaseSpec) -> str:
    """The input whose values are drawn: this one, or the input that it shares its tensor with."""
    first, second = case.conditions.get("same_tensor", (None, None))
    return first if first is not None and name == second else name


def addend_axes(arg: Argument, role: str) -> tuple[str, ...]:
    return tuple(axis for axis, letter in arg.spec.types if letter == ADDEND_TYPE[role])


def addends(arg: Argument, array: np.ndarray, case: CaseSpec, role: str) -> np.ndarray:
    """[ranks, *shape]: one random addend per rank of the axes, in the tested dtype, which sum to about the array.

    All addends except the last are drawn; the last is the rounded remainder, so the reference gets the float64 sum of
    the rounded addends. A non-finite entry goes to one rank and is zero elsewhere.
    """
    count = int(np.prod([case.mesh[axis] for axis in addend_axes(arg, role)], dtype=np.int64))
    if count == 1:
        return array[None]
    rng = generator(case, f"addends {role} {arg.name}")
    finite = np.isfinite(array)
    finite_values = np.where(finite, array, 0.0)
    scale = float(np.abs(finite_values).max(initial=0.0)) or 1.0
    parts = rounded(scale * rng.standard_normal((count - 1, *array.shape)), case.dtype)
    parts = np.concatenate([parts, rounded(finite_values - parts.sum(0), case.dtype)[None]])
    owner = int(rng.integers(count))
    parts[:, ~finite] = 0.0
    parts[owner, ~finite] = array[~finite]
    return parts


def addend_of_rank(
    arg: Argument, addends: np.ndarray, case: CaseSpec, coords: Mapping[str, int], role: str
) -> np.ndarray:
    """The addend of the rank at these mesh coordinates."""
    index = 0
    for axis in addend_axes(arg, role):
        index = index * case.mesh[axis] + coords[axis]
    return addends[index, ...]  # an array even for a scalar


def shard_lengths(case: CaseSpec, dim: str, sharding: Sharding) -> Any:
    """The extra argument of a layout: shard lengths (ragged), padded cu_seqlens (packed), or None."""
    if sharding.layout == "packed":
        return tuple(np.concatenate([[0], np.cumsum(case.lengths[dim]["padded"])]).tolist())
    lengths = case.layouts.get(f"{dim}/{sharding.axis}", {}).get("lengths")
    return None if lengths is None else tuple(lengths)


def layout_function(name: str, lengths: Any, custom: Layouts, trusted: bool) -> Callable[[int, int], Any]:
    """The layout `(size, world) -> positions of each rank`, with its lengths bound."""
    if name in custom:
        return custom[name]
    layout = getattr(trusted_layouts if trusted else production_layouts, name)
    if name == "packed":
        offsets = np.array(lengths) if trusted else torch.tensor(lengths)
        return partial(layout, cu_seqlens=offsets)
    return partial(layout, lengths=lengths) if name == "ragged" else layout


def positions(arg: Argument, case: CaseSpec, coords: Mapping[str, int], custom: Layouts) -> list[np.ndarray]:
    """Global positions that one rank holds, dim by dim."""
    return [
        _dim_positions(dim, size, case, coords, custom)
        for dim, size in zip(arg.spec.dims, arg.shape(case), strict=True)
    ]


def _dim_positions(dim: Dim, size: int, case: CaseSpec, coords: Mapping[str, int], custom: Layouts) -> np.ndarray:
    ids = np.arange(size)
    for sharding in dim.shardings:
        lengths, world = shard_lengths(case, dim.name, sharding), case.mesh[sharding.axis]
        if sharding.layout in custom:
            layout = custom[sharding.layout]
            by_rank = custom_layout.parts(sharding.layout, layout, dim.name, len(ids), sharding.axis, world)
            custom_layout.check_ranks(sharding.layout, by_rank, world)
            trusted_layouts.check_partition(sharding.layout, by_rank, len(ids))
        else:
            by_rank = built_in_positions(sharding.layout, len(ids), world, lengths)
        ids = ids[np.asarray(by_rank[coords[sharding.axis]], dtype=np.int64)]
    return ids


@lru_cache(maxsize=256)  # each rank asks at least twice for each tensor, and a case has few sizes
def built_in_positions(name: str, size: int, world: int, lengths: Any) -> Sequence[np.ndarray]:
    """The positions of each rank under a layout of the reference."""
    by_rank = layout_function(name, lengths, {}, trusted=True)(size, world)
    trusted_layouts.check_partition(name, by_rank, size)
    return by_rank


def check_custom_layouts(arguments: Sequence[Argument], case: CaseSpec, custom: Layouts) -> None:
    """ValueError for a custom layout that omits, repeats or invents positions, or rejects a size."""
    for arg in arguments:
        if any(sharding.layout in custom for dim in arg.spec.dims for sharding in dim.shardings):
            for coords in coordinates(case.mesh):
                positions(arg, case, coords, custom)


def piece(arg: Argument, array: np.ndarray, case: CaseSpec, coords: Mapping[str, int], custom: Layouts) -> np.ndarray:
    """The part of a whole array on one rank."""
    return array[np.ix_(*positions(arg, case, coords, custom))] if arg.spec.dims else array


def local_shape(arg: Argument, case: CaseSpec, coords: Mapping[str, int], custom: Layouts) -> tuple[int, ...]:
    return tuple(len(ids) for ids in positions(arg, case, coords, custom))


def coordinates(mesh: Mapping[str, int]) -> Sequence[dict[str, int]]:
    """Mesh coordinates of every rank, in rank order."""
    return [dict(zip(mesh, index, strict=True)) for index in np.ndindex(*mesh.values())]
