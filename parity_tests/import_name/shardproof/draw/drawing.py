"""Draw one CaseSpec of a scheme from a chooser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from shardproof.declare.case import LARGEST_WORLD, SPARE, CaseSpec
from shardproof.declare.conditions import LARGER_WORLD
from shardproof.declare.counted import counted
from shardproof.declare.declared import Declared
from shardproof.declare.draws import Chooser
from shardproof.declare.keywords import nearest_keyword
from shardproof.draw import calling_conditions, size_choices
from shardproof.draw.arguments import check_arguments
from shardproof.draw.choosers import seeded_chooser

DEFAULT_LIMIT = 8
INSIDE = (False, False, False, True)  # a larger world
ASSUMED = "assume rejects"
LEAST_PADDING = 4  # the unit of dual_chunk_swap over two ranks: one rank gets as much padding as two, less than this
KEYWORDS = ("engine", "examples", "seed", "dtype", "inside_subgroup")  # Scheme.verify also takes sizes and options


class MeshChoices(NamedTuple):
    """The meshes to try, each with the shapes that it can shard; and the others, each with the reason."""

    fits: list[tuple[dict[str, int], list[dict[str, int]]]]
    left_out: list[tuple[dict[str, int], str]]


# Possible meshes and shapes, cached for each scheme and its arguments: finding them takes longer than running an
# example.
_MESH_CHOICES: WeakKeyDictionary[Declared, dict[Any, MeshChoices]] = WeakKeyDictionary()


def one_case(
    scheme: Declared, *, seed: int = 0, engine: str = "lockstep", dtype: str | None = None, **fixed: Any
) -> CaseSpec:
    """The case for a seed; see Scheme.case."""
    check_arguments(scheme.name, seed=seed)
    return draw_case(scheme, seeded_chooser(seed), fixed, dtype=dtype, engine=engine, seed=int(seed))


def draw_case(
    scheme: Declared,
    choose: Chooser,
    fixed: Mapping[str, Any],
    *,
    dtype: str | None = None,
    engine: str = "lockstep",
    seed: int | None = None,
    world: int | None = None,
    limit: int = DEFAULT_LIMIT,
    inside_subgroup: bool | None = False,
    with_conditions: bool = False,
) -> CaseSpec:
    """Draw the choices of a case that `fixed` does not give.

    Inside a subgroup, the mesh has an extra axis that the scheme does not see. `inside_subgroup=None` draws that as
    well, for every fourth case on lockstep: other engines would have to start more ranks. Calling conditions are drawn
    only with `with_conditions`.

    Errors: ValueError for an unknown name, an indivisible size, or if no choice is left.
    """
    # 1. A mesh, then one of the shapes that it can shard, options and a dtype: `coverage.plan` makes these choices.
    sizes, options = _sizes_and_options(scheme, fixed)
    mesh, fits = choose(_cached_mesh_choices(scheme, sizes, options, world, limit).fits)
    shape = choose(fits)
    chosen = option_choices(scheme, mesh, shape, options, choose)
    tested_dtype: str = dtype or choose(scheme.dtypes)
    # 2. Arguments of the layouts: lengths of ragged shards, lengths of packed sequences.
    layouts = _layouts(scheme, mesh, shape, choose)
    lengths = _lengths(scheme, mesh, shape, choose)
    # 3. The values of each input, relative to its shards so that a failure shrinks to a rank and a border.
    values = {
        arg.name: scheme.draws[arg.name].value(choose, _shards(scheme, mesh, scheme.draws[arg.name].dim))
        for arg in scheme.inputs
    }
    # 4. The case, with a seed and a schedule.
    case = CaseSpec(
        scheme=scheme.key,
        mesh=mesh,
        dims=shape,
        dtype=tested_dtype,
        layouts=layouts,
        lengths=lengths,
        values=values,
        options=chosen,
        seed=choose(range(2**16)) if seed is None else seed,
        engine=engine,
        schedule=choose(range(8)),
    )
    # 5. The world around the mesh and the calling conditions, last, so that they change none of the choices above.
    if inside_subgroup is None:
        is_drawn = engine == "lockstep" and LARGER_WORLD not in scheme.excluded_conditions
        inside_subgroup = is_drawn and 2 * case.world <= LARGEST_WORLD and choose(INSIDE)
    case = case.replace(mesh={SPARE: 2, **mesh}) if inside_subgroup else case
    if not with_conditions or scheme.module is not None:  # a module runs its own backward
        return case
    given = {**sizes, **options}
    other = partial(another, scheme, case, given, choose, dtype=dtype)
    return case.replace(conditions=calling_conditions.draw_conditions(scheme, choose, other, case.dtype))


def priced_case(
    scheme: Declared,
    choose: Chooser,
    mesh: Mapping[str, int],
    fixed: Mapping[str, Any],
    *,
    dtype: str | None = None,
    seed: int = 0,
) -> CaseSpec:
    """A case on a mesh of any size, for its cost only: it may have more ranks than can be run.

    Other dims are the smallest that the mesh can shard, options the first that `assume` allows; `choose` draws the
    lengths of shards and sequences. Errors: ValueError as in draw_case, or if no size fits.
    """
    sizes, fixed_options = _sizes_and_options(scheme, {**mesh, **fixed})
    shapes = size_choices.shapes(scheme, sizes, [mesh], 1, fixed_options, with_pairs=False)
    if not shapes:
        raise ValueError(f"scheme '{scheme.name}': {size_choices.no_shape(scheme, sizes, mesh)}")
    shape = shapes[0]
    reason = size_choices.objection(scheme, shape, mesh, sizes)
    options = size_choices.assumed_options(scheme, shape, mesh, fixed_options) if reason is None else []
    if not options:
        raise ValueError(f"scheme '{scheme.name}': {reason or f'{ASSUMED} these sizes and options'}")
    layouts, lengths = _layouts(scheme, mesh, shape, choose), _lengths(scheme, mesh, shape, choose)
    values = {name: draw.value(choose, _shards(scheme, mesh, draw.dim)) for name, draw in scheme.draws.items()}
    record = {"dims": shape, "layouts": layouts, "lengths": lengths, "values": values, "options": options[0]}
    return CaseSpec(scheme.key, dict(mesh), dtype=dtype or scheme.dtypes[0], seed=seed, **record)


def another(
    scheme: Declared,
    case: CaseSpec,
    sizes: Mapping[str, int],
    choose: Chooser,
    *,
    same_shapes: bool | None = None,
    dtype: str | None = None,
) -> CaseSpec:
    """A case for a second call on the same mesh, which differs from `case` in its values and in one more respect.

    That is the lengths of its sequences and shards, one size or as few as possible, an option, the dtype, or nothing:
    a buffer or cache whose key lacks one of these is right until a call differs in this alone. `sizes` and `dtype` are
    given by the user and stay. `same_shapes` chooses between nothing and a size; by default all are drawn.
    """
    if same_shapes is not None:
        respect = "values" if same_shapes else "sizes"
    else:
        respect = choose(_respects(scheme, case, sizes, dtype))
    changes: dict[str, Any] = {}
    if respect == "sizes":
        changes["dims"] = choose(_nearest_shapes(scheme, case, sizes) or [case.dims])
    elif respect in scheme.all_options:
        changes["options"] = {**case.options, respect: choose(_other_values(scheme, case, respect))}
    elif respect == "dtype":
        changes["dtype"] = choose([each for each in scheme.dtypes if each != case.dtype])
    new_case = case.replace(**changes)
    drawn = _values_of_sizes(scheme, new_case, choose)
    if respect in ("lengths", "sizes"):
        return _of_another_seed(drawn, case)
    return _of_another_seed(new_case.replace(values=drawn.values, seed=drawn.seed), case)


def _respects(scheme: Declared, case: CaseSpec, sizes: Mapping[str, int], dtype: str | None) -> list[str]:
    """In what a second call may differ; values and sizes as often as all others together."""
    has_lengths = bool(case.lengths) or any("lengths" in record for record in case.layouts.values())
    rarer = [*(["lengths"] if has_lengths else []), *(["dtype"] if dtype is None and len(scheme.dtypes) > 1 else [])]
    rarer += [name for name in scheme.all_options if name not in sizes and _other_values(scheme, case, name)]
    common = ["values", *(["sizes"] if _nearest_shapes(scheme, case, sizes) else [])]
    return [*common * max(len(rarer) // len(common), 1), *rarer]


def _other_values(scheme: Declared, case: CaseSpec, name: str) -> list[Any]:
    """The other values of one option that `assume` allows with all else as it is."""
    others = [value for value in scheme.all_options[name] if value != case.options.get(name)]
    return [
        value
        for value in others
        if size_choices.assumed_options(scheme, case.dims, case.scheme_mesh, {**case.options, name: value})
    ]


def _nearest_shapes(scheme: Declared, case: CaseSpec, sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The shapes that can be drawn and differ from the case's in the fewest free dims, at least in one."""
    free = size_choices.free_dims(scheme)
    given = {**{name: size for name, size in sizes.items() if name not in scheme.mesh}, **case.scheme_mesh}
    choices = _cached_mesh_choices(scheme, given, case.options, None, DEFAULT_LIMIT)
    differing = [
        (sum(shape[name] != case.dims[name] for name in free), shape) for _, fits in choices.fits for shape in fits
    ]
    least = min((count for count, _ in differing if count), default=0)
    return [shape for count, shape in differing if count and count == least]


def _values_of_sizes(scheme: Declared, case: CaseSpec, choose: Chooser) -> CaseSpec:
    """The case with all else drawn again: values, seed and the lengths of its shards and sequences."""
    sizes = {dim: case.dims[dim] for dim in size_choices.free_dims(scheme)}
    fixed = {**case.scheme_mesh, **sizes, **case.options}
    drawn = draw_case(scheme, choose, fixed, dtype=case.dtype, engine=case.engine)
    return drawn.replace(mesh=case.mesh)


def _of_another_seed(new_case: CaseSpec, case: CaseSpec) -> CaseSpec:
    """The case with another seed: the same kind and seed would give the same values."""
    return new_case if new_case.seed != case.seed else new_case.replace(seed=case.seed + 1)


def fitting_meshes(scheme: Declared, fixed: Mapping[str, Any], world: int | None = None) -> list[dict[str, int]]:
    """The meshes that can shard the given sizes, smallest first. Errors: as in draw_case."""
    sizes, options = _sizes_and_options(scheme, fixed)
    return [mesh for mesh, _ in _cached_mesh_choices(scheme, sizes, options, world, DEFAULT_LIMIT).fits]


def meshes_left_out(
    scheme: Declared, fixed: Mapping[str, Any], world: int | None = None, limit: int = DEFAULT_LIMIT
) -> list[tuple[dict[str, int], str]]:
    """The meshes that cannot shard the given or any drawn sizes, with the reason. Errors: as in draw_case."""
    sizes, options = _sizes_and_options(scheme, fixed)
    fixed_prefixes = (ASSUMED, *(f"{name}=" for name in sizes))
    return [
        (mesh, reason if reason.startswith(fixed_prefixes) else f"of the sizes drawn, {reason}")
        for mesh, reason in _cached_mesh_choices(scheme, sizes, options, world, limit).left_out
    ]


def mesh_choices(
    scheme: Declared, fixed: Mapping[str, Any], world: int | None = None, limit: int = DEFAULT_LIMIT
) -> tuple[MeshChoices, dict[str, Any]]:
    """The meshes and shapes that `draw_case` chooses from, and the given options. Errors: as in draw_case."""
    sizes, options = _sizes_and_options(scheme, fixed)
    return _cached_mesh_choices(scheme, sizes, options, world, limit), options


def _cached_mesh_choices(
    scheme: Declared, sizes: Mapping[str, int], options: Mapping[str, Any], world: int | None, limit: int
) -> MeshChoices:
    cached = _MESH_CHOICES.setdefault(scheme, {})
    key = tuple(sorted(sizes.items())), repr(options) if scheme.assume else "", world, limit
    if key not in cached:
        cached[key] = _mesh_choices(scheme, sizes, options, world, limit)
    return cached[key]


def _mesh_choices(
    scheme: Declared, sizes: Mapping[str, int], options: Mapping[str, Any], world: int | None, limit: int
) -> MeshChoices:
    """Sort the meshes into usable and left-out ones. Errors: ValueError if none can shard anything."""

    def rejection(reason: str) -> ValueError:
        return ValueError(f"scheme '{scheme.name}': {reason}")

    tried = size_choices.meshes(scheme, sizes, world)
    if not tried:
        reason = f"has {counted(world, 'rank')}" if world else f"has {LARGEST_WORLD} ranks or fewer, which is the limit"
        axes = {**scheme.mesh, **{axis: size for axis, size in sizes.items() if axis in scheme.mesh}}
        raise rejection(f"no mesh of {size_choices.sizes_text(axes)} {reason}")
    shapes_of = partial(size_choices.shapes, scheme, sizes, tried, limit, options, with_pairs=limit > 1)
    shapes = shapes_of()
    if not any(_gives_numbers(scheme, shape) for shape in shapes):
        shapes = shapes_of(with_smallest=False) or shapes
    tied = [f"{name}={rule}" for name, rule in scheme.dims.items() if isinstance(rule, str)]
    nothing = (
        f"no sizes agree with {', '.join(tied)} and can be sharded" if tied else "no size of its dims can be sharded"
    )
    sorted_meshes = MeshChoices([], [])
    for mesh in tried:
        fits = [shape for shape in shapes if size_choices.compatible(scheme, shape, mesh, options)]
        if fits:
            sorted_meshes.fits.append((mesh, fits))
        elif reason := size_choices.never(scheme, mesh, sizes):
            raise rejection(reason)
        else:
            reason = _rejected_by_assume(scheme, sizes, mesh, options)
            reason = reason or (size_choices.objection(scheme, shapes[0], mesh, sizes) if shapes else None)
            sorted_meshes.left_out.append((mesh, reason or nothing))
    # If sizes were given, meshes that cannot shard them are left out; otherwise it is a mistake in the declaration.
    mistaken = [(mesh, reason) for mesh, reason in sorted_meshes.left_out if not reason.startswith(ASSUMED)]
    if not sorted_meshes.fits and not mistaken:
        mesh, reason = sorted_meshes.left_out[0]
        where = size_choices.sizes_text(mesh)
        raise rejection(f"{reason}, on {where} as on each mesh; loosen it, or name sizes that satisfy it: dims={{...}}")
    if mistaken and (not sorted_meshes.fits or not sizes):
        mesh, reason = mistaken[-1]
        named = "" if sizes else f"mesh {mesh} can never be drawn: "
        raise rejection(f"{named}{reason}")
    return sorted_meshes


def _gives_numbers(scheme: Declared, shape: Mapping[str, int]) -> bool:
    """Whether an output has elements: without them a verdict says nothing."""
    return any(all(dim.size(shape) for dim in arg.spec.dims) for arg in scheme.outputs)


def _rejected_by_assume(
    scheme: Declared, sizes: Mapping[str, int], mesh: Mapping[str, int], options: Mapping[str, Any]
) -> str | None:
    """A sentence if only `assume` rejects this mesh, with the simplest rejected sizes; else None."""
    without = replace(scheme, assume=None)
    for shape in size_choices.shapes(without, sizes, [mesh], 1, with_pairs=False) if scheme.assume else ():
        if size_choices.compatible(without, shape, mesh):
            return f"{ASSUMED} {size_choices.sizes_text(shape, options)} and all other sizes that were tried"
    return None


def _sizes_and_options(scheme: Declared, fixed: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Split the caller's keywords into sizes (mesh axes and dims) and options."""
    dims = {*size_choices.free_dims(scheme), *scheme.dims}
    options = scheme.all_options
    sizes, chosen = {}, {}
    for name, value in fixed.items():
        if name in scheme.mesh or name in dims:
            smallest = 1 if name in scheme.mesh else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise ValueError(f"scheme '{scheme.name}': {name}={value!r}; sizes are integers >= {smallest}")
            sizes[name] = value
        elif name in options:
            if isinstance(value, str) and all(isinstance(choice, bool) for choice in options[name]):
                raise ValueError(f"scheme '{scheme.name}': {name}={value!r}; its choices are True and False")
            chosen[name] = value
        else:
            names = [*scheme.mesh, *sorted(dims), *options]
            hint = nearest_keyword(name, [*names, *KEYWORDS])
            raise ValueError(
                f"scheme '{scheme.name}': {name!r} is not a mesh axis, dim or option ({', '.join(names)}){hint}"
            )
    return sizes, chosen


def option_choices(
    scheme: Declared, mesh: Mapping[str, int], shape: Mapping[str, int], fixed: Mapping[str, Any], choose: Chooser
) -> dict[str, Any]:
    """A value for each option that is not given; together they satisfy `assume`."""
    allowed = size_choices.assumed_options(scheme, shape, mesh, fixed) if scheme.assume else []
    chosen: dict[str, Any] = {}
    for name, choices in scheme.all_options.items():
        values = [value for value in choices if any(options[name] == value for options in allowed)]
        choice = choose(values if scheme.assume and name not in fixed else choices)
        chosen[name] = fixed.get(name, choice)
        allowed = [options for options in allowed if options[name] == chosen[name]]
    return chosen


def _shards(scheme: Declared, mesh: Mapping[str, int], name: str | None) -> int:
    count = 1
    for arg in (*scheme.inputs, *scheme.outputs):
        for dim in arg.spec.dims:
            if dim.name == name:
                count = max(count, int(np.prod([mesh[sharding.axis] for sharding in dim.shardings], dtype=np.int64)))
    return count


def _layouts(
    scheme: Declared, mesh: Mapping[str, int], shape: Mapping[str, int], choose: Chooser
) -> dict[str, dict[str, Any]]:
    """The layout of every sharding, with drawn shard lengths if it is ragged."""
    records: dict[str, dict[str, Any]] = {}
    for arg in (*scheme.inputs, *scheme.outputs):
        for dim in arg.spec.dims:
            for sharding in dim.shardings:
                record: dict[str, Any] = {"name": sharding.layout}
                key = f"{dim.name}/{sharding.axis}"
                if sharding.layout == "ragged" and key not in records and len(dim.shardings) == 1:
                    record["lengths"] = _ragged(dim.size(shape), mesh[sharding.axis], choose)
                records.setdefault(key, record)
    return records


def _ragged(size: int, world: int, choose: Chooser) -> list[int]:
    """Shard lengths: DTensor's ceil rule, or any partition, including empty shards."""
    step = -(-size // world)
    ceil = [max(0, min(step, size - step * rank)) for rank in range(world)]
    if choose((True, False)):
        return ceil
    borders = sorted(choose(range(size + 1)) for _ in range(world - 1))
    return np.diff([0, *borders, size]).tolist()


def _lengths(
    scheme: Declared, mesh: Mapping[str, int], shape: Mapping[str, int], choose: Chooser
) -> dict[str, dict[str, list[int]]]:
    """Real and padded lengths of the sequences of every packed dim: uneven, some empty, some of one token."""
    lengths: dict[str, dict[str, list[int]]] = {}
    for name in _packed_dims(scheme):
        unit = size_choices.sequence_unit(scheme, mesh, name)
        count = sequence_count(scheme, name, shape)
        blocks = shape[name] // unit
        may_be_empty = all(draw.empty for draw in scheme.draws.values() if draw.dim == name)
        places = _places(blocks, _shards(scheme, mesh, name), may_be_empty)
        borders: list[int] = []
        for _ in range((count or choose((1, 2, 3))) - 1):
            if places:
                borders.append(choose(places))
            if borders and not may_be_empty:
                places = [place for place in places if place != borders[-1]]
        padded = [unit * int(n) for n in np.diff([0, *sorted(borders), blocks])]
        most = max(unit, LEAST_PADDING) if _has_both_offsets(scheme, name) else unit
        lengths[name] = {
            "padded": padded,
            "real": [n - choose(range(min(n, most))) if n else 0 for n in padded],
        }
    return lengths


def _places(blocks: int, world: int, may_be_empty: bool) -> list[int]:
    """Where a sequence may end: anywhere, and a third of the choices is where a rank's shard ends."""
    places = list(range(blocks + 1) if may_be_empty else range(1, blocks))
    ends = [blocks // world * rank for rank in range(1, world)] if blocks % world == 0 else []
    return places + ends * (len(places) // (2 * len(ends))) if ends else places


def _has_both_offsets(scheme: Declared, name: str) -> bool:
    """Whether a scheme tells real from padded sequences of a dim: there is padding then on one rank too."""
    return {draw.padded for draw in scheme.draws.values() if draw.kind == "offsets" and draw.dim == name} == {
        False,
        True,
    }


def _packed_dims(scheme: Declared) -> Sequence[str]:
    sharding = [
        dim.name for arg in scheme.inputs for dim in arg.spec.dims if any(c.layout == "packed" for c in dim.shardings)
    ]
    described = [draw.dim for draw in scheme.draws.values() if draw.kind in ("offsets", "lengths") and draw.dim]
    return list(dict.fromkeys([*sharding, *described]))


def sequence_count(scheme: Declared, name: str, shape: Mapping[str, int]) -> int | None:
    """The number of sequences that an input of offsets or lengths has room for; None leaves it to the draw."""
    for arg in scheme.inputs:
        how = scheme.draws[arg.name]
        if how.kind in ("offsets", "lengths") and how.dim == name:
            size = shape[arg.spec.dims[0].name]
            return max(size - 1, 1) if how.kind == "offsets" else max(size, 1)
    return None
