"""Predict a parallelized model's shards, bytes and collectives, without ranks, memory or messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from textwrap import wrap
from typing import Annotated, Any

from torch import nn
from torch.distributed.tensor import Placement, Shard

from torch_impl.contract import Module, PositiveInt, TypeProblem, contract, type_name
from torch_impl.parallelizer.communication_counts import (
    CollectiveCount,
    FsdpAxes,
    expert_counts,
    fsdp_counts,
    keeps_dtypes,
    style_counts,
    total,
)
from torch_impl.parallelizer.expert_layouts import layout_of
from torch_impl.parallelizer.expert_sharding import fsdp_dims
from torch_impl.parallelizer.expert_validation import validate_experts
from torch_impl.parallelizer.fsdp2 import check_dims
from torch_impl.parallelizer.hf_plan import get_hf_tp_shard_plan, style_names
from torch_impl.parallelizer.lora_styles import module_placements
from torch_impl.parallelizer.mesh_axes import roles_of
from torch_impl.parallelizer.module_names import generic, names_of
from torch_impl.parallelizer.tp_plan import Plan, validate_styles
from torch_impl.parallelizer.tp_styles import sharded_dim

OF_PARTS = {1: "", 2: " of each half", 3: " of each third"}


@dataclass(frozen=True)
class ParameterShards:
    """One row of the table: a parameter that several layers may have, and its shard on a rank between steps."""

    name: str
    count: int
    shape: tuple[int, ...]
    placements: str
    local_shape: tuple[int, ...]
    local_bytes: int  # over all layers, on the first rank, which has the longest shard


@dataclass(frozen=True)
class DryRun:
    """The result of `dry_run`, printed as a table. `unmatched` are keys of the model's plan that match nothing;
    `unknown` are modules whose collectives are not counted, because there is no rule for their style."""

    mesh: dict[str, int]
    parameters: tuple[ParameterShards, ...]
    collectives: tuple[CollectiveCount, ...]
    unmatched: tuple[str, ...]
    unknown: tuple[str, ...]
    total_bytes: int

    @property
    def local_bytes(self) -> int:
        """The bytes of parameters that the first rank stores between steps."""
        return sum(each.local_bytes for each in self.parameters)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The tables as text. If a row has more than `width` characters, each parameter's shards are below its name."""
        ranks = prod(self.mesh.values())
        rows = [("parameter", "of", "shape", "placements", "on a rank", "bytes")]
        rows += [
            (p.name, str(p.count), _times(p.shape), p.placements, _times(p.local_shape), f"{p.local_bytes:,}")
            for p in self.parameters
        ]
        calls = [("each microbatch", "collective", "axis", "calls", "bytes passed in")]
        calls += [(c.phase, c.op, c.axis, str(c.calls), f"{c.bytes_in:,}") for c in self.collectives]
        head = (
            f"{' '.join(f'{axis}={size}' for axis, size in self.mesh.items())}: {ranks} rank{'s' * (ranks != 1)}; "
            f"{self.local_bytes:,} of {self.total_bytes:,} bytes of parameters on each"
        )
        remarks = [f"plan key {key!r} matches nothing in this model" for key in self.unmatched]
        remarks += [f"collectives of {name!r} are not counted: no rule for its style" for name in self.unknown]
        parameters = _align_columns(rows)
        if width is not None and max(map(len, parameters)) > width:
            names, shards = (_align_columns([row[part] for row in rows]) for part in (slice(3), slice(3, None)))
            parameters = [line for name, shard in zip(names, shards, strict=True) for line in (name, f"    {shard}")]
        lines = [*_broken([head], width), "", *parameters, "", *_align_columns(calls), *_broken(remarks, width)]
        return "\n".join(lines)


class SizesKind:
    """A mapping of axis names to positive sizes."""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return TypeProblem(f" is {type_name(value)}; pass a dict of axis name -> size")
        for axis, size in value.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                return f"[{axis!r}]={size!r} is not a size; it is 1 or more"
        return None


MeshSizes = Annotated[Mapping[str, int], SizesKind()]


@contract
def dry_run(model: Module, mesh: MeshSizes, tp_shard_plan: Plan | None = None, *, tokens: PositiveInt = 1) -> DryRun:
    """Predict the result of `fsdp2_strategy_parallelize` for a model over a mesh of the sizes `mesh`.

    The default `tp_shard_plan` is the model's own if tp is above 1. `tokens` is the size of one rank's micro-batch. All
    sets of experts count as equally likely. Gradients are reduced in the last micro-batch, in the policy's dtype.

    Cost:   no collective; no memory beyond the model's own, which is none on the meta device.
    Errors: as `fsdp2_strategy_parallelize`; ValueError for a size below 1, or tokens below 1.
    """
    # 1. Find the sizes of the axes by their roles.
    check_dims(model)
    roles, shard_name = roles_of(tuple(mesh))
    tp, ep = (mesh.get(roles[role] or "", 1) for role in ("tp", "ep"))
    edp, dense = _fsdp_axes(mesh, roles, shard_name)
    # 2. Find the style and the placements of each module that the plan names or ep shards.
    plan = tp_shard_plan if tp_shard_plan is not None else get_hf_tp_shard_plan(model) if tp > 1 else {}
    styles = validate_styles(model, plan, tp, dense.shards)
    experts = validate_experts(model, None if roles["ep"] is None else ep, tp)
    styles = {name: entry for name, entry in styles.items() if name not in experts}
    placements = {
        f"{name}.{leaf}": placement
        for name, (_, style) in styles.items()
        for leaf, placement in module_placements(style, model.get_submodule(name)).items()
    }
    stacks = {}
    for name, module in experts.items():
        stacks |= {f"{name}.{leaf}": dim for leaf, dim in fsdp_dims(module, edp.shards).items()}
        if roles["tp"] is not None:
            layout = layout_of(module)
            placements |= {f"{name}.{leaf}": layout.placement(leaf) for leaf in layout.dims}
    shapes = {
        id(p): _local_shape(_local_shape(p.shape, Shard(0), ep if name in stacks else 1), placements.get(name), tp)
        for name, p in model.named_parameters()
    }
    # 3. Count the collectives of FSDP, of each style and of experts.
    sharded_first = {  # FSDP pads the dim that it shards
        id(p): (shapes[id(p)][stacks.get(name, 0)], prod(shapes[id(p)]) // shapes[id(p)][stacks.get(name, 0)])
        for name, p in model.named_parameters()
    }
    counts = fsdp_counts(model, shapes | sharded_first, dense, experts.values(), edp)
    unknown, keeps_dtype = [], keeps_dtypes(model)
    k = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    for name, module in experts.items():
        counts += expert_counts(module, keeps_dtype, tokens, k, (ep, tp), ("ep", roles["tp"] or "")) if k else []
        unknown += [] if k else [generic(name)]
    for name, (_, style) in styles.items():
        module_counts = style_counts(model.get_submodule(name), style, tp, roles["tp"] or "", tokens, keeps_dtype)
        counts += module_counts or []
        unknown += [generic(name)] if module_counts is None else []
    # 4. List the keys of the model's own plan that match nothing.
    keys = style_names(model) if tp > 1 and tp_shard_plan is None else {}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    return DryRun(
        mesh=dict(mesh),
        parameters=tuple(_parameter_shards(model, placements, shapes, (dense, edp), roles["tp"], stacks)),
        collectives=tuple(sorted(total(counts), key=lambda each: (each.phase != "forward", each.axis, each.op))),
        unmatched=tuple(_keys_without_match(keys, names)),
        unknown=tuple(dict.fromkeys(unknown)),
        total_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _fsdp_axes(mesh: Mapping[str, int], roles: Mapping[str, str | None], shard_name: str) -> tuple[FsdpAxes, FsdpAxes]:
    """The FSDP axes of experts, which exclude ep, and of all other parameters, which include ep."""
    names = [name for name in (roles["shard"], roles["data"], roles["cp"]) if name is not None]
    replicas, replicate = mesh.get(roles["replicate"] or "", 1), roles["replicate"] or ""
    axis = names[0] if len(names) == 1 else shard_name
    edp = FsdpAxes(prod(mesh[name] for name in names), axis, replicas, replicate)
    if mesh.get(roles["ep"] or "", 1) == 1:
        return edp, edp
    over_ep = f"{shard_name}_ep" if names else "ep"
    return edp, FsdpAxes(edp.shards * mesh["ep"], over_ep, replicas, replicate)


def _parameter_shards(
    model: nn.Module,
    tp_placements: Mapping[str, Placement],
    shapes: Mapping[int, tuple[int, ...]],
    fsdp: tuple[FsdpAxes, FsdpAxes],
    tp_axis: str | None,
    stacks: Mapping[str, int],
) -> list[ParameterShards]:
    """One row for parameters of equal name, shape and placements; `stacks` has FSDP's dim for each stack."""
    rows: dict[tuple[str, tuple[int, ...], str, tuple[int, ...]], list[int]] = {}
    for name, parameter in model.named_parameters():
        axes, placement = fsdp[name in stacks], tp_placements.get(name)
        fsdp_dim = stacks.get(name, 0)
        local = _local_shape(shapes[id(parameter)], Shard(fsdp_dim), axes.shards)
        dim, parts = sharded_dim(placement)
        on_tp = "Replicate()" if dim is None else f"Shard({dim})" + OF_PARTS.get(parts, f" of each of {parts} parts")
        placed = [f"{axes.replicate} Replicate()"] if axes.replicas > 1 else []
        placed += [f"{axes.shard} Shard({fsdp_dim})"] + ["ep Shard(0)"] * (name in stacks)
        placements = ", ".join(placed + [f"{tp_axis} {on_tp}"] * (tp_axis is not None))
        # With * for the layer's number, a parameter has the same name in all layers.
        key = generic(name), tuple(parameter.shape), placements, local
        rows.setdefault(key, []).append(prod(local) * parameter.element_size())
    return [
        ParameterShards(name, len(sizes), shape, placements, local, sum(sizes))
        for (name, shape, placements, local), sizes in rows.items()
    ]


def _keys_without_match(keys: Mapping[str, str], names: list[str]) -> list[str]:
    """The keys that match nothing, with or without the inner model's prefix."""
    matched = [key for key in keys if names_of(key, names)]
    # An inner model's plan is read under several prefixes, and only one of them is right.
    return [key for key in keys if key not in matched and not any(other.endswith(f".{key}") for other in matched)]


def _local_shape(shape: tuple[int, ...], placement: Placement | None, ranks: int) -> tuple[int, ...]:
    """The first rank's shard of a tensor; its full shape if no dim is sharded."""
    dim, parts = sharded_dim(placement)
    if dim is None:
        return tuple(shape)
    # DTensor rounds up in each part: the first rank has the longest shard.
    return (*shape[:dim], parts * -(-shape[dim] // (parts * ranks)), *shape[dim + 1 :])


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _align_columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _broken(lines: list[str], width: int | None) -> list[str]:
    """The lines, broken between words where they have more than `width` characters."""
    if width is None:
        return lines
    return [part for line in lines for part in wrap(line, width, subsequent_indent="  ", break_long_words=False)]
