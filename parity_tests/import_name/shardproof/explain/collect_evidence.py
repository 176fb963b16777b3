"""Collect the evidence on a wrong tensor for `explain`: owners, layouts, borders, shards, collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardproof.declare.case import CaseSpec
from shardproof.declare.declared import Argument, Declared
from shardproof.declare.spec import Spec
from shardproof.draw import inputs
from shardproof.engines.ledger import MESSAGES, CallSite, Ledger
from shardproof.engines.program import Program
from shardproof.engines.protocol import disagreement
from shardproof.engines.stitch import owners
from shardproof.explain.evidence import Evidence, ShardedDim
from shardproof.judge.compare import COARSER, TensorComparison, max_finite
from shardproof.judge.reference import UNIT_ROUNDOFF

FEW_BITS = 4
LONG = 3  # places of a dim that has a first and a last one, and others
ADDS, SUMS = ("all_reduce", "reduce", "reduce_scatter"), ("SUM", "AVG")


def collect_evidence(
    scheme: Declared,
    program: Program,
    case: CaseSpec,
    tensor: TensorComparison,
    outputs_pass: bool,
    ledger: Ledger,
    budgets_by_roundings: Mapping[int, np.ndarray],
) -> Evidence:
    """The evidence of one run on one tensor."""
    at = tensor.stitched.coordinates[tensor.copy]
    divergence = disagreement(ledger)
    sharded_dims, counted = _sharded_dims(scheme, case, tensor), _counted(scheme, program, case)
    return Evidence(
        name=tensor.name,
        role=tensor.role,
        got=tensor.got,
        want=tensor.want,
        budgets=tensor.element_budgets,
        axes=dict(case.mesh),
        dims=tensor.argument.spec.dim_names,
        sizes=dict(case.dims),
        owners=tensor.owners,
        at=at,
        layouts=sharded_dims,
        custom_layouts=scheme.layouts,
        borders=borders(scheme, program, case, tensor),
        inputs=_addable(scheme, program, case, tensor),
        before=program.full_array(tensor.argument, case) if tensor.argument.modified else None,
        by_rank={axis: tensor.stitched.by_rank(axis, at) for axis in tensor.stitched.part_axes if case.mesh[axis] > 1},
        gradient_is_none=tensor.gradient_is_none,
        outputs_pass=outputs_pass,
        coarse_budgets=tensor.coarse_budgets,
        budgets_by_roundings=budgets_by_roundings,
        wide_sums=scheme.sums is not None,
        coarse_dtype=COARSER[case.dtype],
        narrow_dtype=tensor.dtype if UNIT_ROUNDOFF.get(tensor.dtype, 0.0) > UNIT_ROUNDOFF[case.dtype] else None,
        rounded_dtype=_rounded_dtype(tensor.got, tensor.dtype),
        max_finite=max_finite(tensor.dtype),
        full_mesh_collective=_full_mesh_collective(case, ledger),
        first_divergence=None if divergence is None else divergence.finding,
        shares={name: share for name, (_, share) in counted.items() if share != 1},
        counts={name: count for name, (count, _) in counted.items()},
        summed_axes=_summed_axes(case, ledger),
    )


def _rounded_dtype(got: np.ndarray, dtype: str) -> str | None:
    """The narrowest dtype that has all numbers of the tensor, if it is narrower than the tensor's own dtype.

    None if every number has a few bits, as 0, 1 and 0.5 do: every dtype has those.
    """
    with np.errstate(invalid="ignore"):
        bits = np.frexp(got)[0] * 2**FEW_BITS
    if np.array_equal(bits, bits.round(), equal_nan=True):
        return None
    narrower = [each for each, unit in UNIT_ROUNDOFF.items() if unit > UNIT_ROUNDOFF.get(dtype, 1.0)]
    by_unit = sorted(narrower, key=UNIT_ROUNDOFF.__getitem__, reverse=True)
    return next((each for each in by_unit if np.array_equal(inputs.rounded(got, each), got, equal_nan=True)), None)


def _counted(scheme: Declared, program: Program, case: CaseSpec) -> dict[str, tuple[int, float]]:
    """The number and the share of elements that count, for each mask and for each input with ignored ids."""
    counted = {}
    for arg in scheme.inputs:
        draw = scheme.draws[arg.name]
        ignored: Any = getattr(draw, "ignore", None)
        if draw.kind == "mask" or ignored is not None:
            full = program.full_array(arg, case)
            counts = full.astype(bool) if ignored is None else ~np.isin(full, ignored)
            if counts.any():
                counted[arg.name] = int(counts.sum()), float(counts.mean())
    return counted


def _summed_axes(case: CaseSpec, ledger: Ledger) -> frozenset[str]:
    """The axes over which a collective of the forward adds the ranks' tensors."""
    coordinates = inputs.coordinates(case.mesh)
    groups = {row.group for row in ledger.rows if row.phase == "fwd" and row.op in ADDS and row.reduce_op in SUMS}
    return frozenset(axis for axis in case.mesh for group in groups if len({coordinates[r][axis] for r in group}) > 1)


def _full_mesh_collective(case: CaseSpec, ledger: Ledger) -> CallSite | None:
    """A collective over the full mesh, if no single axis spans it; a message to a global rank is none."""
    everyone = tuple(range(case.world))
    if case.world in case.mesh.values():
        return None
    rows = (r for r in ledger.rows if r.group == everyone and r.op not in MESSAGES)
    return next((CallSite(r.op, r.source, r.phase) for r in rows), None)


def _addable(scheme: Declared, program: Program, case: CaseSpec, tensor: TensorComparison) -> dict[str, np.ndarray]:
    """Floating inputs with no dim that an output lacks, in the output's shape."""
    names = tensor.argument.spec.dim_names
    if tensor.role != "output" or len(set(names)) < len(names):
        return {}
    by_name = {}
    for arg in scheme.inputs:
        arg_dims = arg.spec.dim_names
        if (
            scheme.draws[arg.name].kind == "float"
            and arg_dims
            and set(arg_dims) <= set(names)
            and len(set(arg_dims)) == len(arg_dims)
        ):
            x = program.full_array(arg, case)
            ordered = x.transpose(sorted(range(x.ndim), key=lambda index: names.index(arg_dims[index])))
            shape = [tensor.want.shape[index] if name in arg_dims else 1 for index, name in enumerate(names)]
            by_name[arg.name] = np.broadcast_to(ordered.reshape(shape), tensor.want.shape)
    return by_name


def _sharded_dims(scheme: Declared, case: CaseSpec, tensor: TensorComparison) -> tuple[ShardedDim, ...]:
    """The shardings of dims that one axis of several ranks shards, or one axis alone.

    A second sharding has positions of a shard, not of the full dim.
    """
    placed = []
    for index, dim in enumerate(tensor.argument.spec.dims):
        shardings = dim.shardings
        if len(shardings) > 1:
            shardings = [sharding for sharding in shardings if case.mesh[sharding.axis] > 1]
        if len(shardings) == 1:
            sharding = shardings[0]
            lengths = inputs.shard_lengths(case, dim.name, sharding)
            layout = inputs.layout_function(sharding.layout, lengths, scheme.layouts, trusted=True)
            size = tensor.want.shape[index]
            positions = [
                np.asarray(rank_positions, dtype=np.int64) for rank_positions in layout(size, case.mesh[sharding.axis])
            ]
            placed.append(ShardedDim(index, sharding.axis, sharding.layout, positions))
    return tuple(placed)


def borders(scheme: Declared, program: Program, case: CaseSpec, tensor: TensorComparison) -> dict[str, np.ndarray]:
    """Masks of places with frequent mistakes: borders of sequences and shards, padding, kinds of ids."""
    return {**_borders(case, tensor, _sharded_dims(scheme, case, tensor)), **id_marks(scheme, program, case, tensor)}


def _borders(case: CaseSpec, tensor: TensorComparison, sharded_dims: Sequence[ShardedDim]) -> dict[str, np.ndarray]:
    """Masks of borders of sequences and shards, and of padding."""
    shape = tensor.want.shape
    names = tensor.argument.spec.dim_names
    masks: dict[str, np.ndarray] = {}
    for index, name in enumerate(names):
        if name in case.lengths:
            for text, mask in zip(("sequence boundaries", "padding"), _sequences(case, name), strict=True):
                masks[text] = masks.get(text, False) | _along(mask, index, shape)
    edges = np.zeros(shape, dtype=bool)
    for index in range(len(shape)):
        for owner in tensor.owners.values() if shape[index] > 1 else ():
            changes = np.diff(owner, axis=index) != 0
            edges |= np.insert(changes, 0, False, axis=index) | np.insert(changes, shape[index] - 1, False, axis=index)
    # From narrow to wide: a region is named only if it is smaller than the ones before.
    halos = [_halos(case, tensor, sharded_dims, width) for width in (1, 2, 3)]
    narrow = masks | halos[0] | ({"shard borders": edges} if edges.any() else {}) | halos[1] | halos[2]
    return narrow | _later_sequences(case, names, shape) | _ends(names, shape)


def _ends(names: Sequence[str], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Masks of the first and the last place along each dim and along all: ids that are padded or clamped go there."""
    long = [index for index, size in enumerate(shape) if size >= LONG]
    dims = [[index] for index in long] + ([long] if len(long) > 1 else [])
    masks = {}
    for end, words in ((0, "first"), (-1, "last")):
        for indices in dims:
            along = [_along(np.arange(shape[i]) == range(shape[i])[end], i, shape) for i in indices]
            masks[f"the {words} place of {' and '.join(names[i] for i in indices)}"] = np.logical_and.reduce(along)
    return masks


def _later_sequences(case: CaseSpec, names: Sequence[str], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Masks of all sequences behind the first one with tokens, where borders between sequences matter."""
    masks = {}
    for index, name in enumerate(names):
        padded = [length for length in case.lengths.get(name, {}).get("padded", ()) if length]
        if len(padded) > 1:
            masks[f"sequences behind the first of {name}"] = _along(np.arange(sum(padded)) >= padded[0], index, shape)
    return masks


def _halos(
    case: CaseSpec, tensor: TensorComparison, sharded_dims: Sequence[ShardedDim], width: int
) -> dict[str, np.ndarray]:
    """Masks of `width` places before and after the borders of a dim's shards, if they cover at most half of the dim."""
    masks, places = {}, "place" if width == 1 else f"{width} places"
    for sharded in sharded_dims:
        name, shape = tensor.argument.spec.dim_names[sharded.dim], tensor.want.shape
        begins = _beginnings(sharded, shape[sharded.dim], is_packed=name in case.lengths)
        before = np.isin(np.arange(len(begins)), np.subtract.outer(np.flatnonzero(begins), 1 + np.arange(width)))
        after = np.isin(np.arange(len(begins)), np.add.outer(np.flatnonzero(begins), np.arange(width)))
        for text, mask in ((f"the last {places} before", before), (f"the first {places} after", after)):
            if mask.any() and 2 * mask.sum() <= len(mask):
                masks[f"{text} a shard border of {name}"] = _along(mask, sharded.dim, shape)
    return masks


def _beginnings(sharded: ShardedDim, size: int, is_packed: bool) -> np.ndarray:
    """Starts of runs of consecutive positions on a rank, except the very first; both chunks of dual_chunk_swap."""
    begins = np.zeros(size, dtype=bool)
    for positions in sharded.positions:
        follows = np.diff(positions, prepend=-2) == 1
        if sharded.layout == "dual_chunk_swap" and not is_packed:
            follows[len(positions) // 2 :][:1] = False  # the last rank's chunks are neighbours
        begins[positions[~follows]] = True
    begins[:1] = False
    return begins


def _sequences(case: CaseSpec, name: str) -> tuple[np.ndarray, np.ndarray]:
    edges = np.zeros(case.dims[name], dtype=bool)
    padding = np.zeros(case.dims[name], dtype=bool)
    start = 0
    for padded, real in zip(case.lengths[name]["padded"], case.lengths[name]["real"], strict=True):
        if real:
            edges[[start, start + real - 1]] = True
        padding[start + real : start + padded] = True
        start += padded
    return edges, padding


def _along(mask: np.ndarray, index: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(mask.reshape([-1 if i == index else 1 for i in range(len(shape))]), shape)


def id_marks(scheme: Declared, program: Program, case: CaseSpec, tensor: TensorComparison) -> dict[str, np.ndarray]:
    """Name -> mask, for every id input whose dims lead this tensor's dims."""
    masks: dict[str, np.ndarray] = {}
    for arg in scheme.inputs:
        how = scheme.draws[arg.name]
        names = arg.spec.dim_names
        if how.kind != "ids" or how.dim is None or tensor.argument.spec.dim_names[: len(names)] != names:
            continue
        for text, mask in _marked(scheme, case, how.dim, program.full_array(arg, case)).items():
            padded = mask.reshape(mask.shape + (1,) * (tensor.want.ndim - mask.ndim))
            masks[f"positions where {arg.name} {text}"] = np.broadcast_to(padded, tensor.want.shape)
    return masks


def _marked(scheme: Declared, case: CaseSpec, dim: str, ids: np.ndarray) -> dict[str, np.ndarray]:
    size = case.dims[dim]
    masks = {"is out of vocabulary": (ids < 0) | (ids >= size)}
    for axis, owner in _owners_of(scheme, case, dim).items():
        change = np.flatnonzero(np.diff(owner)) + 1
        borders = {"is the first id of a shard": np.append(change, 0)}
        borders["is the last id of a shard"] = np.append(change, size) - 1
        masks |= {text: masks.get(text, False) | np.isin(ids, border) for text, border in borders.items()}
        inside = np.where((ids >= 0) & (ids < size), ids, 0)
        for rank in range(case.mesh[axis]) if case.mesh[axis] > 1 else ():
            masks[f"belongs to {axis} rank {rank}"] = (owner[inside] == rank) & ~masks["is out of vocabulary"]
    return {text: mask for text, mask in masks.items() if mask.any()}


def _owners_of(scheme: Declared, case: CaseSpec, dim: str) -> dict[str, np.ndarray]:
    """For each axis that shards a dim, the coordinate of each position, from the first spec that shards it."""
    for arg in (*scheme.inputs, *scheme.outputs):
        for part in arg.spec.dims:
            if part.name == dim and part.shardings:
                return owners(Argument(dim, Spec((part,))), case, scheme.layouts)
    return {}
