"""DTensor's sharding propagation, computed once for all ranks of lockstep.

Before the first call of an operation, DTensor runs it on fake tensors of full size for the shape and dtype of the
result, and compares the ways to shard it: 3 to 8 ms of CPU time. It caches the answer by thread and mesh. Ranks of
lockstep are threads and each has its own mesh, so 8 ranks would compute the same answer 8 times, and again for the next
mesh. Here a rank gets the answer of the first rank that asked, with its own mesh filled in.

The answer depends on the operation, its arguments, the size of the mesh and the registered strategies; it depends on
the rank only through the sizes of its shards. So answers are not shared if a dim does not divide evenly. A placement
with state, such as the mask of a vocabulary-parallel embedding, shares only the shape and dtype of the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _len_torch_dispatch_stack

PROPAGATION, METADATA = "propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"
STRATEGIES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
SETTINGS = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
STRIDED = getattr(placement_types, "_StridedShard", Shard)  # shards each of `split_factor` equal parts
MOST = 20_000  # some kB each

_answers: dict[Hashable, Any] = {}
_metadata: dict[Hashable, Any] = {}


class NotShared(Exception):
    """An operation whose answer may differ between ranks, or that no key describes."""


@contextmanager
def shared() -> Iterator[None]:
    """Share answers between all threads; restores torch's own functions on leaving."""
    if not (hasattr(ShardingPropagator, PROPAGATION) and hasattr(ShardingPropagator, METADATA)):
        yield  # these names are missing in this torch: each rank computes for itself
        return
    originals = {name: getattr(ShardingPropagator, name) for name in (PROPAGATION, METADATA)}

    def propagated(self: Any, schema: OpSchema) -> Any:
        return _propagated(self, schema, partial(originals[PROPAGATION], self))

    def metadata(self: Any, schema: OpSchema) -> Any:
        return _shape_and_dtype(schema, partial(originals[METADATA], self))

    setattr(ShardingPropagator, PROPAGATION, propagated)
    setattr(ShardingPropagator, METADATA, metadata)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ShardingPropagator, name, original)


def _propagated(propagator: Any, schema: OpSchema, compute: Callable[[OpSchema], Any]) -> Any:
    try:
        key, mesh = _key(schema, _placed), _mesh(schema)
    except NotShared:
        return compute(schema)
    strategies = [getattr(propagator, name, {}).get(schema.op) for name in STRATEGIES]
    known, answer = _answers.get(key, ((), None))
    if known and all(map(operator.is_, known, strategies)):  # else a strategy was registered since
        return _on_mesh(answer, mesh)
    answer = compute(schema)
    if _is_same_on_all_ranks(answer):
        _store(_answers, key, (strategies, _on_mesh(answer, None)))  # a copy: torch writes into the answer later
    return answer


def _shape_and_dtype(schema: OpSchema, compute: Callable[[OpSchema], Any]) -> Any:
    try:
        key = _key(schema, _described)
    except NotShared:
        return compute(schema)
    if key not in _metadata:
        _store(_metadata, key, compute(schema))
    return _metadata[key]


def _store(table: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(table) >= MOST:
        table.clear()
    table[key] = value


def _key(schema: OpSchema, part_of_spec: Callable[[DTensorSpec], Hashable]) -> Hashable:
    """The key of everything that the answer depends on. Errors: NotShared."""
    # User operations may be redeclared, and a mode or autocast may change an operation.
    if schema.op.namespace != "aten" or torch._C._len_torch_function_stack() or _len_torch_dispatch_stack():
        raise NotShared
    if torch.is_autocast_enabled("cpu"):
        raise NotShared

    def part(value: Any) -> Hashable:
        if isinstance(value, DTensorSpec):
            return part_of_spec(value)
        if type(value) in (list, tuple):
            return type(value), tuple(map(part, value))
        if type(value) is float:
            return float, value.hex()  # 0.0 and -0.0 are equal, and nan is not equal to itself
        if type(value) not in SETTINGS:
            raise NotShared
        return type(value), value  # 1 and True are equal, and promote differently

    keywords = tuple((name, part(value)) for name, value in schema.kwargs_schema.items())
    return schema.op, torch.get_default_dtype(), part(schema.args_schema), keywords


def _described(spec: DTensorSpec) -> Hashable:
    meta = spec.tensor_meta
    if meta is None or not all(type(number) is int for number in (*meta.shape, *meta.stride)):
        raise NotShared
    return spec.mesh.device_type, meta


def _placed(spec: DTensorSpec) -> Hashable:
    if not _is_even(spec):
        raise NotShared
    mesh = spec.mesh
    of_mesh = mesh.shape, mesh.mesh_dim_names
    return _described(spec), of_mesh, spec.placements, spec.shard_order, spec.use_strided_shard_as_shard_order


def _is_even(spec: DTensorSpec) -> bool:
    """Whether every rank has a shard of the same size, under placements without state."""
    left = list(spec.tensor_meta.shape if spec.tensor_meta else ())
    for placement, size in zip(spec.placements, spec.mesh.shape, strict=True):
        if type(placement) in (Replicate, Partial):
            continue
        dim: int = getattr(placement, "dim", -1)
        if type(placement) not in (Shard, STRIDED) or not 0 <= dim < len(left):
            return False
        if left[dim] % (size * getattr(placement, "split_factor", 1)):
            return False
        left[dim] //= size
    return True


def _mesh(schema: OpSchema) -> Any:
    """The one mesh of the operation's tensors. Errors: NotShared if there are several."""
    meshes = [spec.mesh for spec in _specs((schema.args_schema, schema.kwargs_schema))]
    if not meshes or any(mesh is not meshes[0] and mesh != meshes[0] for mesh in meshes):
        raise NotShared
    return meshes[0]


def _is_same_on_all_ranks(answer: Any) -> bool:
    return isinstance(answer, OutputSharding) and all(map(_is_even, _specs(answer)))


def _specs(value: Any) -> Iterator[DTensorSpec]:
    if isinstance(value, DTensorSpec):
        yield value
    elif isinstance(value, OutputSharding):
        yield from _specs((value.output_spec, value.redistribute_schema))
    elif isinstance(value, OpSchema):
        yield from _specs((value.args_schema, value.kwargs_schema))
    elif isinstance(value, dict):
        yield from _specs(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _specs(each)


def _on_mesh(value: Any, mesh: Any) -> Any:
    """A copy of an answer, or of a part of one, with another mesh in it; `mesh=None` removes the mesh."""
    if isinstance(value, DTensorSpec):
        return replace(value, mesh=mesh)
    if isinstance(value, OutputSharding):
        output, schema = (_on_mesh(part, mesh) for part in (value.output_spec, value.redistribute_schema))
        return replace(value, output_spec=output, redistribute_schema=schema)
    if isinstance(value, OpSchema):
        arguments, keywords = (_on_mesh(part, mesh) for part in (value.args_schema, value.kwargs_schema))
        return replace(value, args_schema=arguments, kwargs_schema=keywords)
    if isinstance(value, dict):
        return {name: _on_mesh(each, mesh) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_mesh(each, mesh) for each in value)
    return value
