"""The few shapes to draw: JAX compiles once per shape, so a scheme varies little in shape and much in other ways."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax_ref.layouts import indivisible, needs
from shardproof.declare.case import LARGEST_WORLD, SizesAndOptions
from shardproof.declare.declaration_failure import DeclarationFailure, of_scheme
from shardproof.declare.declared import Declared
from shardproof.declare.dim_formulas import complete_dims, names_in
from shardproof.declare.spec import Dim, Sharding
from shardproof.draw import custom_layout
from shardproof.draw.scheme_cache import once_for_scheme
from shardproof.endings.raised import message_of, pass_interrupt

LOCAL = (2, 3, 5, 1, 8)  # local sizes of a dim; with 1, many mistakes do not show
LOCAL_WORDS = {1: "one", 2: "two"}
TURNS = len(LOCAL) ** 2  # more rounds give few new shapes
SEARCHED = 4096  # combinations of sizes tried for an `assume`
FACTORS = range(1, 65)  # of dims in formulas, tried until the derived dims can be sharded


def meshes(scheme: Declared, fixed: Mapping[str, int], world: int | None) -> list[dict[str, int]]:
    """Mesh sizes to try, smallest world first, none above the limit; `world` keeps those with that many ranks."""
    sizes = [(fixed[axis],) if axis in fixed else axis_sizes for axis, axis_sizes in scheme.mesh.items()]
    tried = [dict(zip(scheme.mesh, combination, strict=True)) for combination in itertools.product(*sizes)]
    allowed = [
        mesh
        for mesh in tried
        if math.prod(mesh.values()) in (range(1, LARGEST_WORLD + 1) if world is None else (world,))
    ]
    return sorted(allowed, key=lambda mesh: (math.prod(mesh.values()), *mesh.values()))


def shapes(
    scheme: Declared,
    fixed: Mapping[str, int],
    tried: Sequence[Mapping[str, int]],
    limit: int,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    with_smallest: bool = True,
    with_pairs: bool = True,
) -> list[dict[str, int]]:
    """About `limit` shapes, simplest first, with at least one for every mesh.

    The first shape, `with_smallest`, has local sizes (1, ...) on the first mesh. `with_pairs`, shapes follow until each
    mesh has each of its possible `features`, beyond the limit if necessary. Rounds fill up to the limit: the first
    takes local sizes (2, 3, 5, ...), the next (3, 5, 1, ...) and so on; in each round each mesh may add the shape with
    these local sizes. If there are too many meshes for that, their units are combined. A shape that custom layouts or
    `assume` reject on every mesh is skipped, unless there is no other. If sizes depend on the mesh, each mesh has its
    own shapes.
    """
    if scheme.depends_on_mesh and not all(axis in fixed for axis in scheme.mesh):
        each = max(limit // max(len(tried), 1), 1)
        return [
            shape
            for number, mesh in enumerate(tried)
            for shape in shapes(
                scheme, {**fixed, **mesh}, [mesh], each, options, with_smallest=number == 0, with_pairs=with_pairs
            )
        ]
    is_tried = bool(scheme.layouts or scheme.assume)
    units = _units_of_rounds(scheme, fixed, tried, limit)
    offered: list[dict[str, int]] = []
    chosen: list[dict[str, int]] = []

    def offer(units: Sequence[Mapping[str, int]], turn: int) -> None:
        for unit in units:
            shape = shape_of_turn(scheme, fixed, unit, turn)
            if shape is None or shape in offered:
                continue
            offered.append(shape)
            suits_one = not is_tried or any(compatible(scheme, shape, mesh, options) for mesh in tried)
            if len(chosen) < limit and suits_one:
                chosen.append(shape)

    offer(units[:with_smallest], 0)
    if with_pairs:
        chosen += _pair_shapes(scheme, fixed, tried, options, chosen)
        offered += chosen
    for turn in range(1, TURNS):
        offer(units, turn)
    for mesh in tried if is_tried else ():
        chosen += _own_shape(scheme, fixed, mesh, options, chosen)
    return chosen or offered[:limit]


def _units_of_rounds(
    scheme: Declared, fixed: Mapping[str, int], tried: Sequence[Mapping[str, int]], limit: int
) -> Sequence[Mapping[str, int]]:
    """The unit of each size on each mesh; with too many meshes, one unit that serves them all."""
    units = list({tuple(sorted(unit.items())): unit for unit in (units_of(scheme, mesh) for mesh in tried)}.values())
    if len(units) > max(limit // 2, 1):
        common = {name: math.lcm(*(unit[name] for unit in units)) for name in units[0]}
        if shape_of_turn(scheme, fixed, common, 0) is not None:
            return [common]
    return units


def _own_shape(
    scheme: Declared,
    fixed: Mapping[str, int],
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    chosen: Sequence[Mapping[str, int]],
) -> list[dict[str, int]]:
    """One more shape for a mesh, if custom layouts or `assume` reject all chosen shapes there; none if nothing fits."""
    if any(compatible(scheme, shape, mesh, options) for shape in chosen):
        return []
    unit = units_of(scheme, mesh)
    shapes = itertools.chain(
        (shape_of_turn(scheme, fixed, unit, turn) for turn in range(TURNS)), _search(scheme, fixed, unit)
    )
    return list(itertools.islice((shape for shape in shapes if shape and compatible(scheme, shape, mesh, options)), 1))


def features(scheme: Declared, shape: Mapping[str, int], mesh: Mapping[str, int]) -> set[tuple[str, str]]:
    """The features of a shape on a mesh, as (dim, words): ("h", "h=4") for a dim with a list of sizes. For every other
    sharded dim the words say whether a rank has one row (or the fewest that its layout allows), two or more.
    """
    units = units_of(scheme, mesh)
    found = set[tuple[str, str]]()
    for name in free_dims(scheme):
        if name not in shape:
            continue
        if len(scheme.dims.get(name, ())) > 1:
            found.add((name, f"{name}={shape[name]}"))
        elif name in units and name not in scheme.dims and (local := shape[name] // units[name]):
            found.add((name, f"{name} of {LOCAL_WORDS.get(local, 'more')} on each rank"))
    return found


def has_smallest_size(scheme: Declared, shape: Mapping[str, int], mesh: Mapping[str, int]) -> bool:
    """Whether a dim without listed sizes has 1, or one on each rank: with such a size many mistakes do not show."""
    units = units_of(scheme, mesh)
    return any(shape[name] < 2 * units.get(name, 1) for name in free_dims(scheme) if name not in scheme.dims)


def _pair_shapes(
    scheme: Declared,
    fixed: Mapping[str, int],
    tried: Sequence[Mapping[str, int]],
    options: Mapping[str, Any],
    chosen: Sequence[Mapping[str, int]],
) -> list[dict[str, int]]:
    """Add shapes until each mesh has every feature; there are few of them, because one shape has several features.

    Listed sizes of dims are combined with every mesh. Other sharded dims have each local size on the largest mesh: a
    halo may be wider than a neighbour's shard there, and smaller meshes follow in the rounds.
    """
    added: list[dict[str, int]] = []
    for mesh in reversed(tried):
        unit = units_of(scheme, mesh)
        covered = set[tuple[str, str]]()
        for shape in (*chosen, *added):
            if compatible(scheme, shape, mesh, options):
                covered |= features(scheme, shape, mesh)
        for name in free_dims(scheme):
            if name in fixed:
                continue
            declared, step = scheme.dims.get(name, ()), unit.get(name, 0)
            sizes = [size for size in declared if isinstance(size, int)] if len(declared) > 1 else []
            if not declared and step and mesh is tried[-1]:
                sizes = [step * local for local in (3, 1, 2)]
            for size in sizes:
                if features(scheme, {name: size}, mesh) <= covered:
                    continue
                # Prefer a turn that has the size by itself, with its usual other sizes; else fix the size.
                wanted = features(scheme, {name: size}, mesh)
                turns = [fixed] if not declared else []
                shape = None
                for given in (*turns, {**fixed, name: size}):
                    shape = shape or _new_shape(scheme, given, unit, mesh, options, covered, wanted, len(added))
                if shape is not None:
                    added.append(shape)
                    covered |= features(scheme, shape, mesh)
    return added


def _new_shape(
    scheme: Declared,
    fixed: Mapping[str, int],
    unit: Mapping[str, int],
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    covered: Collection[tuple[str, str]],
    wanted: set[tuple[str, str]],
    start: int,
) -> dict[str, int] | None:
    """The fitting shape with the wanted feature that covers most new ones, or None; `start` varies the other sizes."""
    order = (1 + (start + turn) % (TURNS - 1) for turn in range(TURNS - 1))
    turns = [shape for turn in order if (shape := shape_of_turn(scheme, fixed, unit, turn)) is not None]
    turns = [shape for shape in turns if wanted <= features(scheme, shape, mesh)]
    distinct = list({tuple(shape.items()): shape for shape in turns}.values())
    distinct.sort(
        key=lambda shape: -len(features(scheme, shape, mesh).difference(covered))
    )  # stable: early turns first
    fitting = (shape for shape in itertools.chain(distinct, _search(scheme, fixed, unit)) if shape)
    return next((shape for shape in fitting if compatible(scheme, shape, mesh, options)), None)


def no_shape(scheme: Declared, fixed: Mapping[str, int], mesh: Mapping[str, int]) -> str:
    """Why a mesh has no shape at all: none of the sizes listed for a dim is a multiple of the mesh's unit."""
    for name, step in units_of(scheme, mesh).items():
        choices = scheme.dims.get(name, ())
        if name not in fixed and not isinstance(choices, str) and not any(size % step == 0 for size in choices):
            sizes = " or ".join(map(str, choices))
            return f"{name}={sizes} cannot be sharded on {sizes_text(mesh)}; give {name}, a multiple of {step}"
    tied = [f"{name}={rule}" for name, rule in scheme.dims.items() if isinstance(rule, str)]
    return f"{sizes_text(fixed)} does not agree with {', '.join(tied)}"


def compatible(
    scheme: Declared,
    shape: Mapping[str, int],
    mesh: Mapping[str, int],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> bool:
    """Whether this shape can be sharded on this mesh, and `assume` allows it with these options, or with any."""
    return objection(scheme, shape, mesh) is None and bool(assumed_options(scheme, shape, mesh, options))


def assumed_options(
    scheme: Declared, shape: Mapping[str, int], mesh: Mapping[str, int], fixed: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The options that `assume` allows at these sizes, with `fixed` ones kept. Errors: ValueError."""
    choices = {name: (fixed[name],) if name in fixed else values for name, values in scheme.all_options.items()}
    tried = (dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values()))
    if scheme.assume is None:
        return list(itertools.islice(tried, 1))
    allowed = []
    for options in tried:
        case = SizesAndOptions(scheme.key, mesh, shape, options)
        try:
            allowed += [options] if scheme.assume(case) else []
        except BaseException as error:
            pass_interrupt(error)
            from shardproof.engines.ledger import at_users_line  # here: engines are above draws

            where = f"{at_users_line(error)} with {sizes_text(mesh, shape, options)}"
            what = f"assume raised {type(error).__name__}{where}: {message_of(error)}"
            raise ValueError(f"scheme '{scheme.name}': {what}") from error
    return allowed


def sizes_text(*sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size}" for part in sizes for name, size in part.items())


def objection(
    scheme: Declared, shape: Mapping[str, int], mesh: Mapping[str, int], fixed: Collection[str] = ()
) -> str | None:
    """Why this shape cannot be sharded on this mesh, or None; prefers a reason about a dim in `fixed`."""
    if scheme.depends_on_mesh:
        expected = complete_dims(scheme.dims, {name: shape[name] for name in free_dims(scheme)}, mesh)
        for name in expected:
            if shape[name] != expected[name]:
                return (
                    f"{name}={shape[name]} is not {scheme.dims[name]}, which is {expected[name]} on {sizes_text(mesh)}"
                )
    for dim in sorted(_sharded_dims(scheme), key=lambda dim: dim.name not in fixed):
        sizes = [dim.size(shape)]
        for sharding in dim.shardings:
            pieces: list[int] = []
            for size in sizes:
                try:
                    with of_scheme(scheme.name):
                        pieces += _shard_sizes(scheme, dim, size, sharding, mesh[sharding.axis])
                except DeclarationFailure:
                    raise
                except ValueError as error:
                    return str(error)
            sizes = list(dict.fromkeys(pieces))
    return _no_room(scheme, shape) or _too_short(scheme, shape, mesh)


def sequence_unit(scheme: Declared, mesh: Mapping[str, int], name: str) -> int:
    """The length of a padded sequence of this dim must be a multiple of this number; 1 without a packed layout."""
    shardings = [c for dim in _sharded_dims(scheme) if dim.name == name for c in dim.shardings if c.layout == "packed"]
    return 2 * math.prod({c.axis: mesh[c.axis] for c in shardings}.values()) if shardings else 1


def _too_short(scheme: Declared, shape: Mapping[str, int], mesh: Mapping[str, int]) -> str | None:
    """A sentence if a dim has too few tokens for its sequences, which may not be empty; else None."""
    for arg in scheme.inputs:
        draw, rest = scheme.draws[arg.name], {"offsets": 1, "lengths": 0}
        if draw.kind in rest and draw.dim is not None and not draw.empty:
            count = max(arg.spec.dims[0].size(shape) - rest[draw.kind], 1)
            least = count * sequence_unit(scheme, mesh, draw.dim)
            if shape[draw.dim] < least:
                return f"{draw.dim}={shape[draw.dim]} is too short for {count} nonempty sequences; give {least}"
    return None


def _no_room(scheme: Declared, shape: Mapping[str, int]) -> str | None:
    """A sentence if an input has too few offsets or lengths for one sequence, else None."""
    least = {"offsets": 2, "lengths": 1}  # offsets are one more than sequences
    for arg in scheme.inputs:
        kind = scheme.draws[arg.name].kind
        if kind in least and (size := arg.spec.dims[0].size(shape)) < least[kind]:
            return (
                f"{arg.spec.dims[0].name}={size} has no room for the {kind} of one sequence; give {least[kind]} or more"
            )
    return None


def _shard_sizes(scheme: Declared, dim: Dim, size: int, sharding: Sharding, world: int) -> list[int]:
    """The sizes of a dim's shards, for the next sharding to divide; ValueError if it cannot be sharded."""
    if sharding.layout in scheme.layouts:
        parts = custom_layout.parts(
            sharding.layout, scheme.layouts[sharding.layout], dim.name, size, sharding.axis, world
        )
        return [len(part) for part in parts] if sharding is not dim.shardings[-1] else []
    rule = "dual_chunk_swap" if sharding.layout == "packed" else sharding.layout
    if reason := indivisible(dim.name, size, sharding.axis, world, rule):
        raise ValueError(reason)
    return [size // world]


def never(scheme: Declared, mesh: Mapping[str, int], fixed: Collection[str] = ()) -> str | None:
    """A sentence if a custom layout accepts no size of a free dim on this mesh, else None."""
    dims = [dim for dim in _sharded_dims(scheme) if dim.name not in fixed]
    shardings = [(dim, sharding) for dim in dims for sharding in dim.shardings if sharding.layout in scheme.layouts]
    reasons = (
        custom_layout.never(c.layout, scheme.layouts[c.layout], d.name, c.axis, mesh[c.axis]) for d, c in shardings
    )
    with of_scheme(scheme.name):
        return next((reason for reason in reasons if reason), None)


@once_for_scheme
def free_dims(scheme: Declared) -> Sequence[str]:
    """Dims with a free size: all except numbers and dims with a formula."""
    names: dict[str, None] = {}
    for arg in (*scheme.inputs, *scheme.outputs):
        for name in (part for dim in arg.spec.dims for part in dim.parts):
            if not name.isdigit() and not isinstance(scheme.dims.get(name), str):
                names[name] = None
    for rule in scheme.dims:
        if not isinstance(scheme.dims[rule], str):
            names[rule] = None
    return tuple(names)


def shape_of_turn(
    scheme: Declared, fixed: Mapping[str, int], unit: Mapping[str, int], turn: int
) -> dict[str, int] | None:
    """The shape of one round for a mesh with these units; None if the declared sizes cannot be sharded."""
    shape = {}
    for index, name in enumerate(free_dims(scheme)):
        choices = scheme.dims.get(name)
        step = unit.get(name, 1)
        if name in fixed:
            shape[name] = fixed[name]
        elif choices:
            fitting = [size for size in choices if isinstance(size, int) and size % step == 0]
            if not fitting:
                return None
            shape[name] = fitting[(turn + index * (turn > 0) + index * (turn // len(fitting))) % len(fitting)]
        else:
            shift = turn - 1 + index + (turn // len(LOCAL)) * (index + 1)
            shape[name] = step * (LOCAL[shift % len(LOCAL)] if turn else 1) + (name in _offsets_dims(scheme))
    return _complete_shape(scheme, fixed, unit, shape)


def _search(scheme: Declared, fixed: Mapping[str, int], unit: Mapping[str, int]) -> Iterator[dict[str, int] | None]:
    """All combinations of small multiples of the units, smallest first: for an `assume` that rejects every round."""
    if scheme.assume is None:
        return
    names = free_dims(scheme)
    multiples = range(1, max(2, int(SEARCHED ** (1 / max(len(names), 1)))) + 1)
    sizes: list[Sequence[int]] = []
    for name in names:
        declared, step = scheme.dims.get(name), unit.get(name, 1)
        choices = [step * times for times in multiples]
        if declared is not None and not isinstance(declared, str):
            choices = [size for size in declared if size % step == 0]
        sizes.append((fixed[name],) if name in fixed else choices)
    for combination in sorted(itertools.islice(itertools.product(*sizes), SEARCHED), key=sum):
        yield _complete_shape(scheme, fixed, unit, dict(zip(names, combination, strict=True)))


def _complete_shape(
    scheme: Declared, fixed: Mapping[str, int], unit: Mapping[str, int], shape: Mapping[str, int]
) -> dict[str, int] | None:
    """The shape with its derived dims; enlarges the dims in formulas until all can be sharded."""
    mesh = {axis: fixed[axis] for axis in scheme.mesh if axis in fixed}
    names_in_rules = {name for rule in scheme.dims.values() if isinstance(rule, str) for name in names_in(rule)}
    movable = [name for name in names_in_rules if name in shape and name not in fixed and name not in scheme.dims]
    for factor in FACTORS if movable else (1,):
        full = complete_dims(scheme.dims, {**shape, **{name: shape[name] * factor for name in movable}}, mesh)
        if min(full.values(), default=0) < 0 or any(full[name] != fixed[name] for name in fixed if name in full):
            continue
        if not movable or all(full[name] % step == 0 for name, step in unit.items() if name in full):
            return full
    return None


@once_for_scheme
def _offsets_dims(scheme: Declared) -> Collection[str]:
    """Dims that count offsets of sequences: one more than the number of sequences, which is at least one."""
    return {arg.spec.dims[0].name for arg in scheme.inputs if scheme.draws[arg.name].kind == "offsets"}


def units_of(scheme: Declared, mesh: Mapping[str, int]) -> Mapping[str, int]:
    """Each dim's unit on this mesh: its size must be a multiple.

    Custom layouts have no unit and are asked about each size.
    """
    by_mesh, key = _units(scheme), tuple(mesh.items())
    if key not in by_mesh:
        by_mesh[key] = _units_on(scheme, mesh)
    return by_mesh[key]


@once_for_scheme
def _units(scheme: Declared) -> dict[Any, Mapping[str, int]]:
    return {}


def _units_on(scheme: Declared, mesh: Mapping[str, int]) -> dict[str, int]:
    unit: dict[str, int] = {}
    for dim in _sharded_dims(scheme):
        custom = [sharding for sharding in dim.shardings if sharding.layout in scheme.layouts]
        if custom and dim.name in scheme.dims and not isinstance(scheme.dims[dim.name], str):
            continue
        step = 1
        for sharding in reversed(dim.shardings):
            world = mesh[sharding.axis]
            # A packed dim consists of sequences that are each sharded by dual_chunk_swap.
            rule = "dual_chunk_swap" if sharding.layout == "packed" else sharding.layout
            if sharding in custom:
                step = custom_layout.unit(scheme.layouts[sharding.layout], world, step * world) or step * world
            else:
                step = 1 if rule == "ragged" else math.lcm(needs(rule, world), step * world)
        unit[dim.name] = math.lcm(unit.get(dim.name, 1), step)
    return unit


@once_for_scheme
def _sharded_dims(scheme: Declared) -> Sequence[Dim]:
    dims = [dim for arg in (*scheme.inputs, *scheme.outputs) for dim in arg.spec.dims if dim.shardings]
    return tuple(dict.fromkeys(dims))
