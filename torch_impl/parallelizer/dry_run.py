"""A dry run: what parallelizing a model over a mesh would do. Nothing is sent, no rank and no memory is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from torch_impl.contract import Module, PositiveInt, contract, type_name
from torch_impl.parallelizer.communication_counts import (
    CollectiveCount,
    fsdp_counts,
    keeps_dtypes,
    style_counts,
    total,
)
from torch_impl.parallelizer.hf_plan import get_hf_tp_shard_plan, style_names
from torch_impl.parallelizer.mesh_axes import roles_of
from torch_impl.parallelizer.tp_plan import Plan, generic, names_of, validate_styles
from torch_impl.parallelizer.tp_styles import placements_of, sharded_dim


@dataclass(frozen=True)
class ParameterShards:
    """One row of the table: a parameter of all layers, and what a rank stores of it between steps."""

    name: str
    count: int
    shape: tuple[int, ...]
    placements: str
    local_shape: tuple[int, ...]
    local_bytes: int  # of all of them, on the first rank, which has the longest shard


@dataclass(frozen=True)
class DryRun:
    """What `dry_run` returns, printed as a table. `unmatched` are keys of the model's plan that match nothing; of
    `unknown` modules the style has no rule, so that their collectives are not counted."""

    mesh: dict[str, int]
    parameters: tuple[ParameterShards, ...]
    collectives: tuple[CollectiveCount, ...]
    unmatched: tuple[str, ...]
    unknown: tuple[str, ...]
    total_bytes: int

    @property
    def local_bytes(self) -> int:
        """Bytes of parameters that the first rank stores between steps."""
        return sum(each.local_bytes for each in self.parameters)

    def __str__(self) -> str:
        ranks = prod(self.mesh.values())
        rows = [("parameter", "of", "shape", "placements", "on a rank", "bytes")]
        rows += [
            (p.name, str(p.count), _times(p.shape), p.placements, _times(p.local_shape), f"{p.local_bytes:,}")
            for p in self.parameters
        ]
        calls = [("each microbatch", "collective", "axis", "calls", "bytes passed in")]
        calls += [(c.phase, c.op, c.axis, str(c.calls), f"{c.bytes_in:,}") for c in self.collectives]
        lines = [
            f"{' '.join(f'{axis}={size}' for axis, size in self.mesh.items())}: {ranks} rank{'s' * (ranks != 1)}; "
            f"{self.local_bytes:,} of {self.total_bytes:,} bytes of parameters on each",
            "",
            *_align_columns(rows),
            "",
            *_align_columns(calls),
        ]
        lines += [f"plan key {key!r} matches nothing in this model" for key in self.unmatched]
        lines += [f"collectives of {name!r} are not counted: no rule for its style" for name in self.unknown]
        return "\n".join(lines)


class SizesKind:
    """A mapping of axis names to positive sizes."""

    def validate(self, function: str, name: str, value: Any, sizes: Any) -> None:
        if not isinstance(value, Mapping):
            raise TypeError(f"{function}: {name} is {type_name(value)}; pass a dict of axis name -> size")
        for axis, size in value.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{function}: {name}[{axis!r}]={size!r} is not a size; it is 1 or more")


MeshSizes = Annotated[Mapping[str, int], SizesKind()]


@contract
def dry_run(model: Module, mesh: MeshSizes, tp_shard_plan: Plan | None = None, *, tokens: PositiveInt = 1) -> DryRun:
    """What `fsdp2_strategy_parallelize` would do with a model, best on the meta device, over a mesh of these sizes.

    Without a plan the model's own is used where tp is more than 1. `tokens` are those of one rank's microbatch, which
    tensor parallelism communicates; gradients are reduced in the last one alone. Precision is the default's: bfloat16
    with float32 sums, float64 for float64.

    Cost:   no collective; no memory beyond the model's own.
    Errors: those of `fsdp2_strategy_parallelize`; ValueError for a size below 1, or tokens below 1.
    """
    # 1. The sizes of the axes by their roles.
    roles, shard_name = roles_of(tuple(mesh))
    tp, replicas = (mesh.get(roles[role] or "", 1) for role in ("tp", "replicate"))
    shards = prod(mesh.get(roles[role] or "", 1) for role in ("shard", "data", "cp"))
    shard_axes = [name for name in (roles["shard"], roles["data"], roles["cp"]) if name is not None]
    shard_axis = shard_axes[0] if len(shard_axes) == 1 else shard_name
    # 2. The style and the placements of each module that the plan names.
    plan = tp_shard_plan if tp_shard_plan is not None else get_hf_tp_shard_plan(model) if tp > 1 else {}
    styles = validate_styles(model, plan, tp, shards)
    placements = {
        f"{name}.{leaf}": placement
        for name, (_, style) in styles.items()
        for leaf, placement in placements_of(style, model.get_submodule(name)).items()
    }
    shapes = {id(p): _local_shape(p.shape, placements.get(name), tp) for name, p in model.named_parameters()}
    # 3. The collectives of FSDP and of each style.
    counts = fsdp_counts(model, shapes, shards, replicas, (shard_axis, roles["replicate"] or ""))
    unknown, keeps_dtype = [], keeps_dtypes(model)
    for name, (_, style) in styles.items():
        of_module = style_counts(model.get_submodule(name), style, tp, roles["tp"] or "", tokens, keeps_dtype)
        counts += of_module or []
        unknown += [generic(name)] if of_module is None else []
    # 4. Keys of the model's own plan that match nothing here.
    keys = style_names(model) if tp > 1 and tp_shard_plan is None else {}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    axes = {"tp": roles["tp"], "shard": shard_axis, "replicate": roles["replicate"] if replicas > 1 else None}
    return DryRun(
        mesh=dict(mesh),
        parameters=tuple(_parameter_shards(model, placements, shapes, shards, axes)),
        collectives=tuple(sorted(total(counts), key=lambda each: (each.phase != "forward", each.axis, each.op))),
        unmatched=tuple(_keys_without_match(keys, names)),
        unknown=tuple(dict.fromkeys(unknown)),
        total_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _parameter_shards(
    model: nn.Module,
    tp_placements: Mapping[str, Placement],
    shapes: Mapping[int, tuple[int, ...]],
    shards: int,
    axes: Mapping[str, str | None],
) -> list[ParameterShards]:
    """One row for all layers' parameters of one name, shape and placements."""
    rows: dict[tuple[str, tuple[int, ...], str, tuple[int, ...]], list[int]] = {}
    for name, parameter in model.named_parameters():
        local, placement = _local_shape(shapes[id(parameter)], Shard(0), shards), tp_placements.get(name)
        dim, parts = sharded_dim(placement)
        on_tp = "Replicate()" if dim is None else f"Shard({dim})" + (" of each half" if parts > 1 else "")
        by_role = {"replicate": "Replicate()", "shard": "Shard(0)", "tp": on_tp}
        placements = ", ".join(f"{axes[role]} {how}" for role, how in by_role.items() if axes[role])
        # With * for the number of its layer, a parameter has one name in all layers.
        key = generic(name), tuple(parameter.shape), placements, local
        rows.setdefault(key, []).append(prod(local) * parameter.element_size())
    return [
        ParameterShards(name, len(sizes), shape, placements, local, sum(sizes))
        for (name, shape, placements, local), sizes in rows.items()
    ]


def _keys_without_match(keys: Mapping[str, str], names: list[str]) -> list[str]:
    """Keys that match nothing, with or without the prefix of the inner model."""
    matched = [key for key in keys if names_of(key, names)]
    # The plan of an inner model is read under several prefixes, of which one is right: the others match nothing.
    return [key for key in keys if key not in matched and not any(other.endswith(f".{key}") for other in matched)]


def _local_shape(shape: tuple[int, ...], placement: Placement | None, ranks: int) -> tuple[int, ...]:
    """The first rank's shard of a tensor; its full shape if no dim is sharded."""
    dim, parts = sharded_dim(placement)
    if dim is None:
        return tuple(shape)
    # DTensor's ceil rule, for each of the parts: the first rank has the longest shard.
    return (*shape[:dim], parts * -(-shape[dim] // (parts * ranks)), *shape[dim + 1 :])


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _align_columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
