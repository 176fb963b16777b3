"""What cutting a model over a mesh would do: nothing is sent, no rank and no memory is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.communication_counts import Sent, added, keeps_dtypes, of_fsdp, of_style
from torch_impl.parallelizer.hf_plan import get_hf_tp_shard_plan, named_styles
from torch_impl.parallelizer.mesh_axes import parts_of
from torch_impl.parallelizer.tp_plan import check_kinds, generic, names_of, refuse_sizes, styled_modules
from torch_impl.parallelizer.tp_styles import cut_dim, placements_of


@dataclass(frozen=True)
class Held:
    """Parameters of one name, its layer's number left open: what a rank holds of each between steps."""

    name: str
    count: int
    shape: tuple[int, ...]
    placements: str
    local_shape: tuple[int, ...]
    bytes_held: int  # of all of them, on the first rank, which has the longest part


@dataclass(frozen=True)
class DryRun:
    """The table. `unmatched` are keys of the model's own plan that match nothing; `unknown` modules send what is not
    counted."""

    mesh: dict[str, int]
    parameters: tuple[Held, ...]
    sent: tuple[Sent, ...]
    unmatched: tuple[str, ...]
    unknown: tuple[str, ...]
    bytes_whole: int

    @property
    def bytes_held(self) -> int:
        """Bytes of parameters that the first rank holds between steps."""
        return sum(each.bytes_held for each in self.parameters)

    def __str__(self) -> str:
        ranks = prod(self.mesh.values())
        rows = [("parameter", "of", "shape", "placements", "on a rank", "bytes")]
        rows += [
            (h.name, str(h.count), _times(h.shape), h.placements, _times(h.local_shape), f"{h.bytes_held:,}")
            for h in self.parameters
        ]
        calls = [("each microbatch", "collective", "axis", "calls", "bytes handed in")]
        calls += [(s.phase, s.op, s.axis, str(s.calls), f"{s.bytes_in:,}") for s in self.sent]
        lines = [
            f"{' '.join(f'{axis}={size}' for axis, size in self.mesh.items())}: {ranks} rank{'s' * (ranks != 1)}; "
            f"{self.bytes_held:,} of {self.bytes_whole:,} bytes of parameters on each",
            "",
            *_aligned(rows),
            "",
            *_aligned(calls),
        ]
        lines += [f"plan key {key!r} matches nothing in this model" for key in self.unmatched]
        lines += [f"what {name!r} sends is not counted: its style is not known" for name in self.unknown]
        return "\n".join(lines)


def dry_run(
    model: nn.Module,
    mesh: Mapping[str, int],
    tp_shard_plan: Mapping[str, ParallelStyle] | None = None,
    *,
    tokens: int = 1,
) -> DryRun:
    """What `fsdp2_strategy_parallelize` would do with a model, best on the meta device, over a mesh of these sizes.

    Without a plan the model's own is taken where tp is more than 1. `tokens` are those of one rank's microbatch, which
    tensor parallelism sends; gradients are reduced in the last one alone. Precision is the default's: bfloat16 with
    float32 sums, float64 for float64.

    Cost:   no collective; no memory beyond the model's own.
    Errors: those of `fsdp2_strategy_parallelize`; ValueError for a size below 1, or tokens below 1.
    """
    check_kinds(model, tp_shard_plan)
    for name, size in {**mesh, "tokens": tokens}.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"dry_run: {name}={size!r} is not a size; it is 1 or more")
    parts, shard_name = parts_of(tuple(mesh))
    tp, replicas = (mesh.get(parts[part] or "", 1) for part in ("tp", "replicate"))
    shards = prod(mesh.get(parts[part] or "", 1) for part in ("shard", "data", "cp"))
    named = [name for name in (parts["shard"], parts["data"], parts["cp"]) if name is not None]
    shard_axis = named[0] if len(named) == 1 else shard_name
    plan = tp_shard_plan if tp_shard_plan is not None else get_hf_tp_shard_plan(model) if tp > 1 else {}
    refuse_sizes(model, plan, tp, shards)
    styled = styled_modules(model, plan)
    cut = {
        f"{name}.{leaf}": placement
        for name, (_, style) in styled.items()
        for leaf, placement in placements_of(style, model.get_submodule(name)).items()
    }
    shapes = {id(p): _after_tp(p.shape, cut.get(name), tp) for name, p in model.named_parameters()}
    sent = of_fsdp(model, shapes, shards, replicas, (shard_axis, parts["replicate"] or ""))
    unknown, kept = [], keeps_dtypes(model)
    for name, (_, style) in styled.items():
        own = of_style(model.get_submodule(name), style, tp, parts["tp"] or "", tokens, kept)
        sent += own or []
        unknown += [generic(name)] if own is None else []
    keys = named_styles(model) if tp > 1 and tp_shard_plan is None else {}
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    axes = {"tp": parts["tp"], "shard": shard_axis, "replicate": parts["replicate"] if replicas > 1 else None}
    return DryRun(
        mesh=dict(mesh),
        parameters=tuple(_held(model, cut, shapes, shards, axes)),
        sent=tuple(sorted(added(sent), key=lambda each: (each.phase != "forward", each.axis, each.op))),
        unmatched=tuple(_unmatched(keys, known)),
        unknown=tuple(dict.fromkeys(unknown)),
        bytes_whole=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _held(
    model: nn.Module,
    cut: Mapping[str, Placement],
    shapes: Mapping[int, tuple[int, ...]],
    shards: int,
    axes: Mapping[str, str | None],
) -> list[Held]:
    found: dict[tuple[str, tuple[int, ...], str, tuple[int, ...]], list[int]] = {}
    for name, parameter in model.named_parameters():
        local, placement = _after_tp(shapes[id(parameter)], Shard(0), shards), cut.get(name)
        dim, parts = cut_dim(placement)
        on_tp = "whole" if dim is None else f"Shard({dim})" + (" of each half" if parts > 1 else "")
        each = {"replicate": "whole", "shard": "Shard(0)", "tp": on_tp}
        said = [f"{axes[part]} {how}" for part, how in each.items() if axes[part]]
        key = generic(name), tuple(parameter.shape), ", ".join(said), local
        found.setdefault(key, []).append(prod(local) * parameter.element_size())
    return [
        Held(name, len(sizes), shape, said, local, sum(sizes)) for (name, shape, said, local), sizes in found.items()
    ]


def _unmatched(keys: Mapping[str, str], known: list[str]) -> list[str]:
    """Keys that match nothing, nor do with the prefix under which the model has them."""
    matched = [key for key in keys if names_of(key, known)]
    return [key for key in keys if key not in matched and not any(other.endswith(f".{key}") for other in matched)]


def _after_tp(shape: tuple[int, ...], placement: Placement | None, ranks: int) -> tuple[int, ...]:
    """The first rank's part of a tensor that is cut on one dim, or the whole."""
    dim, parts = cut_dim(placement)
    if dim is None:
        return tuple(shape)
    return (*shape[:dim], parts * -(-shape[dim] // (parts * ranks)), *shape[dim + 1 :])


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
