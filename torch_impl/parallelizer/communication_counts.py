"""What one microbatch sends between ranks, forward and backward: counted from sizes, with no rank there.

Numbers are per rank, of the first one, which has the longest part where parts are uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from torch_impl.parallelizer.blocks import units
from torch_impl.parallelizer.tp_styles import Divided, PackedColwise, PackedRowwise, Whole, WholeSeenInParts


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind in one phase: calls, and the bytes that a rank hands in."""

    phase: str  # forward or backward
    op: str
    axis: str
    calls: int
    bytes_in: int


def added(several: Iterable[Sent]) -> list[Sent]:
    """One entry for each phase, operation and axis."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for each in several:
        calls, size = found.get((each.phase, each.op, each.axis), (0, 0))
        found[each.phase, each.op, each.axis] = calls + each.calls, size + each.bytes_in
    return [Sent(*key, *total) for key, total in found.items()]


def of_fsdp(
    model: nn.Module, shapes: Mapping[int, tuple[int, ...]], shards: int, replicas: int, axes: tuple[str, str]
) -> list[Sent]:
    """Each unit gathered, gathered again if it was freed, its gradient reduced; `axes` are (shard, replicate).

    `shapes` are those that tensor parallelism leaves, by the id of a parameter.
    """
    groups = [[p for block in group for p in block.parameters()] for group in units(model)]
    owned = {id(p) for group in groups for p in group}
    groups.append([p for p in model.parameters() if id(p) not in owned])
    last, found, kept = len(groups) - 2, [], keeps_dtypes(model)
    for number, group in enumerate(groups):
        parameters = list({id(p): p for p in group}.values())
        gathered = sum(_padded(shapes[id(p)], shards) // shards * _itemsizes(p.dtype, kept)[0] for p in parameters)
        moving = [p for p in parameters if p.requires_grad]
        reduced = sum(_padded(shapes[id(p)], shards) * _itemsizes(p.dtype, kept)[1] for p in moving)
        if not parameters:
            continue
        if shards > 1:
            found.append(Sent("forward", "all_gather", axes[0], 1, gathered))
            found += [Sent("backward", "all_gather", axes[0], 1, gathered)] if number != last else []
            found += [Sent("backward", "reduce_scatter", axes[0], 1, reduced)] if reduced else []
        if replicas > 1 and reduced:
            found.append(Sent("backward", "all_reduce", axes[1], 1, reduced // shards))
    return found


def of_style(
    module: nn.Module, style: ParallelStyle, tp: int, axis: str, tokens: int, kept: bool = False
) -> list[Sent] | None:
    """What one styled module sends, its input being differentiable; None where that is not known for its style.

    `kept` says that numbers keep their dtype: see `keeps_dtypes`.
    """
    if tp == 1 or isinstance(style, Divided) or type(style) is Whole:
        return []
    if isinstance(style, WholeSeenInParts):
        sizes = [p.numel() * _itemsizes(p.dtype, kept)[0] for p in module.parameters() if p.requires_grad]
        return [Sent("backward", "all_reduce", axis, len(sizes), sum(sizes))] if sizes else []
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    size = tokens * _itemsizes(module.weight.dtype, kept)[0]
    linear = isinstance(module, nn.Linear)
    enters, leaves = (module.in_features, module.out_features) if linear else (0, module.embedding_dim)
    split = Sent("backward", "all_gather", axis, 1, -(-enters // tp) * size)
    gathered = Sent("forward", "all_gather", axis, 1, -(-leaves // tp) * size)
    summed = Sent("forward", "all_reduce", axis, 1, leaves * size)
    entered = [Sent("backward", "all_reduce", axis, 1, enters * size)] if linear else []
    if isinstance(style, PackedColwise | PackedRowwise):
        return entered if isinstance(style, PackedColwise) else [summed]
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    known: dict[tuple[Placement, Placement], list[Sent]] = {}
    if isinstance(style, RowwiseParallel):
        known[Replicate(), Replicate()] = [summed, split] if linear else [summed]
        known |= {(Shard(-1), Replicate()): [summed]} if linear else {}
    else:
        known = {(Replicate(), Shard(-1)): entered, (Replicate(), Replicate()): [*entered, gathered]}
    return known.get((style.input_layouts[0], style.output_layouts[0]))


def keeps_dtypes(model: nn.Module) -> bool:
    """Whether no number is narrowed where no policy is given, as in a model that has one of float64."""
    return any(parameter.dtype == torch.float64 for parameter in model.parameters())


def _padded(shape: tuple[int, ...], ranks: int) -> int:
    """Numbers of a parameter, its first dim rounded up to a multiple of the ranks."""
    return -(-shape[0] // ranks) * ranks * prod(shape[1:]) if shape else ranks


def _itemsizes(dtype: torch.dtype, kept: bool) -> tuple[int, int]:
    """Bytes that a number is computed with, and its gradient is reduced with, where no policy is given."""
    return (dtype.itemsize, dtype.itemsize) if kept else (2, 4)
