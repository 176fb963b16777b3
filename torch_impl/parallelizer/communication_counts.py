"""Communication of one microbatch, forward and backward, counted from sizes without any rank.

Numbers are per rank, for the first rank, which has the longest shard where shards are uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torch_impl.parallelizer.blocks import units
from torch_impl.parallelizer.tp_styles import (
    DividedInput,
    PackedColwise,
    PackedRowwise,
    Replicated,
    ReplicatedOnShards,
)


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind in one phase: calls, and the bytes that a rank passes in."""

    phase: str  # forward or backward
    op: str
    axis: str
    calls: int
    bytes_in: int


def total(counts: Iterable[CollectiveCount]) -> list[CollectiveCount]:
    """One entry for each phase, operation and axis."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for each in counts:
        calls, size = totals.get((each.phase, each.op, each.axis), (0, 0))
        totals[each.phase, each.op, each.axis] = calls + each.calls, size + each.bytes_in
    return [CollectiveCount(*key, *value) for key, value in totals.items()]


def fsdp_counts(
    model: nn.Module, shapes: Mapping[int, tuple[int, ...]], shards: int, replicas: int, axes: tuple[str, str]
) -> list[CollectiveCount]:
    """The gathers and reductions of each FSDP unit; `axes` are (shard, replicate).

    `shapes` are the shapes after tensor parallelism, by the id of a parameter.
    """
    # 1. The parameters of each unit; those of no block are the root's, whose unit is the last.
    groups = [[p for block in group for p in block.parameters()] for group in units(model)]
    in_blocks = {id(p) for group in groups for p in group}
    groups.append([p for p in model.parameters() if id(p) not in in_blocks])
    last_block, counts, keeps_dtype = len(groups) - 2, [], keeps_dtypes(model)
    for number, group in enumerate(groups):
        parameters = list({id(p): p for p in group}.values())
        if not parameters:
            continue
        # 2. Bytes of a unit: each first dim is padded to a multiple of the ranks.
        gathered = sum(
            _padded_numel(shapes[id(p)], shards) // shards * _itemsizes(p.dtype, keeps_dtype)[0] for p in parameters
        )
        trainable = [p for p in parameters if p.requires_grad]
        reduced = sum(_padded_numel(shapes[id(p)], shards) * _itemsizes(p.dtype, keeps_dtype)[1] for p in trainable)
        # 3. Gathered in forward, again in backward unless it is the last block, then reduced.
        if shards > 1:
            counts.append(CollectiveCount("forward", "all_gather", axes[0], 1, gathered))
            # The last block stays gathered from forward to backward, which begins with it.
            if number != last_block:
                counts.append(CollectiveCount("backward", "all_gather", axes[0], 1, gathered))
            if reduced:
                counts.append(CollectiveCount("backward", "reduce_scatter", axes[0], 1, reduced))
        if replicas > 1 and reduced:
            counts.append(CollectiveCount("backward", "all_reduce", axes[1], 1, reduced // shards))
    return counts


def style_counts(
    module: nn.Module, style: ParallelStyle, tp: int, axis: str, tokens: int, keeps_dtype: bool = False
) -> list[CollectiveCount] | None:
    """The collectives of one module under a style, its input being differentiable; None for a style without a rule.

    `keeps_dtype` is True where the policy keeps every dtype: see `keeps_dtypes`.
    """
    if tp == 1 or isinstance(style, DividedInput) or type(style) is Replicated:
        return []
    if isinstance(style, ReplicatedOnShards):
        sizes = [p.numel() * _itemsizes(p.dtype, keeps_dtype)[0] for p in module.parameters() if p.requires_grad]
        return [CollectiveCount("backward", "all_reduce", axis, len(sizes), sum(sizes))] if sizes else []
    # What other modules receive and return, as experts do, does not follow from the sizes of their parameters.
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    size = tokens * _itemsizes(module.weight.dtype, keeps_dtype)[0]
    is_linear = isinstance(module, nn.Linear)
    width_in, width_out = (module.in_features, module.out_features) if is_linear else (0, module.embedding_dim)
    gather_input_grad = CollectiveCount("backward", "all_gather", axis, 1, -(-width_in // tp) * size)
    gather_output = CollectiveCount("forward", "all_gather", axis, 1, -(-width_out // tp) * size)
    sum_output = CollectiveCount("forward", "all_reduce", axis, 1, width_out * size)
    sum_input_grad = [CollectiveCount("backward", "all_reduce", axis, 1, width_in * size)] if is_linear else []
    if isinstance(style, PackedColwise | PackedRowwise):
        return sum_input_grad if isinstance(style, PackedColwise) else [sum_output]
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    by_layouts: dict[tuple[Placement, Placement], list[CollectiveCount]] = {}  # (input, output) -> collectives
    if isinstance(style, RowwiseParallel):
        by_layouts[Replicate(), Replicate()] = [sum_output, gather_input_grad] if is_linear else [sum_output]
        by_layouts |= {(Shard(-1), Replicate()): [sum_output]} if is_linear else {}
    else:
        by_layouts[Replicate(), Shard(-1)] = sum_input_grad
        by_layouts[Replicate(), Replicate()] = [*sum_input_grad, gather_output]
    return by_layouts.get((style.input_layouts[0], style.output_layouts[0]))


def keeps_dtypes(model: nn.Module) -> bool:
    """Whether the default policy keeps every dtype, as it does for a model with a parameter of float64."""
    return any(parameter.dtype == torch.float64 for parameter in model.parameters())


def _padded_numel(shape: tuple[int, ...], ranks: int) -> int:
    """The number of elements of a parameter, its first dim rounded up to a multiple of the ranks."""
    return -(-shape[0] // ranks) * ranks * prod(shape[1:]) if shape else ranks


def _itemsizes(dtype: torch.dtype, keeps_dtype: bool) -> tuple[int, int]:
    """Bytes of an element in computation and of its gradient in reduction, under the default policy."""
    return (dtype.itemsize, dtype.itemsize) if keeps_dtype else (2, 4)
