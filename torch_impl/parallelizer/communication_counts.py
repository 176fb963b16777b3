"""Count the communication of one micro-batch, forward and backward, from sizes alone; no ranks are needed.

Numbers are for the first rank, which has the longest shard if shards are uneven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torch_impl.expert_parallel.exchange_cost import mean_rows
from torch_impl.parallelizer.blocks import units
from torch_impl.parallelizer.expert_layouts import layout_of, sizes_of
from torch_impl.parallelizer.head_styles import (
    Conv1DColwise,
    Conv1DPackedColwise,
    Conv1DRowwise,
    PerHead,
    ReplicatedHeads,
)
from torch_impl.parallelizer.lora import LoRALinear
from torch_impl.parallelizer.mixed_dtypes import units_of_rarer_dtypes
from torch_impl.parallelizer.tp_styles import (
    DividedInput,
    PackedColwise,
    PackedRowwise,
    Replicated,
    ReplicatedOnShards,
)

INT64, INT32 = 8, 4  # bytes of a count, and of an expert id
SUMMED = 4  # bytes of an element in a sum, which is in float32 or wider


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives of one kind in one phase: the number of calls, and the bytes that a rank passes in."""

    phase: str  # forward or backward
    op: str
    axis: str
    calls: int
    bytes_in: int


def total(counts: Iterable[CollectiveCount]) -> list[CollectiveCount]:
    """Add up the counts for each phase, operation and axis."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for each in counts:
        calls, size = totals.get((each.phase, each.op, each.axis), (0, 0))
        totals[each.phase, each.op, each.axis] = calls + each.calls, size + each.bytes_in
    return [CollectiveCount(*key, *value) for key, value in totals.items()]


@dataclass(frozen=True)
class FsdpAxes:
    """The numbers of ranks that FSDP shards and replicates over, and the names of these axes."""

    shards: int
    shard: str
    replicas: int
    replicate: str


def fsdp_counts(
    model: nn.Module,
    shapes: Mapping[int, tuple[int, ...]],
    axes: FsdpAxes,
    experts: Iterable[nn.Module] = (),
    edp: FsdpAxes | None = None,
) -> list[CollectiveCount]:
    """The gathers and reductions of each FSDP unit; modules of `experts` are units over `edp`.

    Inside a unit, modules of a rarer dtype are units of their own, and are gathered in that dtype.

    `shapes` are the parameters' shapes after tensor and expert parallelism, by parameter id.
    """
    # 1. Find the parameters of each unit. Parameters outside all blocks belong to the root, the last unit.
    groups = [[p for block in group for p in block.parameters()] for group in units(model)]
    in_blocks = {id(p) for group in groups for p in group}
    groups.append([p for p in model.parameters() if id(p) not in in_blocks])
    experts = list(experts)
    rarer = enumerate(units_of_rarer_dtypes(model, experts), len(experts))
    in_rarer = {id(p): number for number, group in rarer for module in group for p in module.parameters()}
    in_experts = {id(p): number for number, module in enumerate(experts) for p in module.parameters()}
    unit_numbers = in_rarer | in_experts
    last_block, counts, keeps_dtype = len(groups) - 2, [], keeps_dtypes(model)
    for number, group in enumerate(groups):
        # 2. Split a layer's experts, and modules of a rarer dtype, from their block's unit: they are units inside it.
        parts: dict[int | None, dict[int, nn.Parameter]] = {}
        for parameter in group:
            parts.setdefault(unit_numbers.get(id(parameter)), {})[id(parameter)] = parameter
        for inner, parameters in parts.items():
            over = edp if inner is not None and inner < len(experts) and edp is not None else axes
            is_rarer = inner is not None and inner >= len(experts)
            counts += _unit_counts(list(parameters.values()), shapes, over, number == last_block, keeps_dtype, is_rarer)
    return counts


def _unit_counts(
    parameters: list[nn.Parameter],
    shapes: Mapping[int, tuple[int, ...]],
    axes: FsdpAxes,
    stays_gathered: bool,
    keeps_dtype: bool,
    is_rarer: bool,
) -> list[CollectiveCount]:
    """Count one unit: gathered in forward, again in backward unless it stays gathered, then reduced.

    A unit of a rarer dtype is gathered in its own dtype.
    """
    # FSDP pads each first dim to a multiple of the ranks.
    gathered = sum(
        _padded_numel(shapes[id(p)], axes.shards) // axes.shards * _itemsizes(p.dtype, keeps_dtype or is_rarer)[0]
        for p in parameters
    )
    trainable = [p for p in parameters if p.requires_grad]
    reduced = sum(_padded_numel(shapes[id(p)], axes.shards) * _itemsizes(p.dtype, keeps_dtype)[1] for p in trainable)
    counts = []
    if axes.shards > 1:
        counts.append(CollectiveCount("forward", "all_gather", axes.shard, 1, gathered))
        # Backward begins with the last block, which stays gathered.
        if not stays_gathered:
            counts.append(CollectiveCount("backward", "all_gather", axes.shard, 1, gathered))
        if reduced:
            counts.append(CollectiveCount("backward", "reduce_scatter", axes.shard, 1, reduced))
    if axes.replicas > 1 and reduced:
        counts.append(CollectiveCount("backward", "all_reduce", axes.replicate, 1, reduced // axes.shards))
    return counts


def expert_counts(
    module: nn.Module, keeps_dtype: bool, tokens: int, k: int, ranks: tuple[int, int], axes: tuple[str, str]
) -> list[CollectiveCount]:
    """The collectives of a module of experts over ep and tp, for `tokens` tokens with k choices each.

    `ranks` and `axes` are the sizes and the names of ep and tp. A token is sent once to each rank with any of its
    experts. The number of rows sent is the mean over all equally likely sets of k experts, rounded up; equally many
    arrive.
    """
    down = module.get_parameter("down_proj")
    (e, *_), (ep, tp), (ep_axis, tp_axis) = down.shape, ranks, axes
    width = sizes_of(module, layout_of(module))["d"]
    itemsize = _itemsizes(down.dtype, keeps_dtype)[0]
    own, wide, counted = -(-tokens // tp), max(itemsize, SUMMED), 2 * ep * INT64
    sent = mean_rows(own * ep, k, e, ep)
    rows, gates, choices = sent * width * itemsize, sent * k * wide, sent * k * INT32
    counts = []
    if ep > 1:
        counts.append(CollectiveCount("forward", "all_to_all", ep_axis, 5, 2 * rows + gates + choices + counted))
        counts.append(CollectiveCount("backward", "all_to_all", ep_axis, 3, 2 * rows + gates))
    if tp > 1:
        outputs, gate_gradients, sums = own * width * itemsize, own * k * wide, tp * sent * width * wide
        arrived = rows + gates + choices + counted
        counts.append(CollectiveCount("forward", "all_gather", tp_axis, 5, arrived + outputs))
        counts.append(CollectiveCount("forward", "reduce_scatter", tp_axis, 1, sums))
        counts.append(CollectiveCount("backward", "all_gather", tp_axis, 3, rows + outputs + gate_gradients))
        counts.append(CollectiveCount("backward", "reduce_scatter", tp_axis, 2, sums + tp * gates))
    return counts


def style_counts(
    module: nn.Module, style: ParallelStyle, tp: int, axis: str, tokens: int, keeps_dtype: bool = False
) -> list[CollectiveCount] | None:
    """The collectives of a module under a style, for an input that requires a gradient; None for an unknown style.

    `keeps_dtype` is True if the policy keeps every dtype: see `keeps_dtypes`.
    """
    if tp == 1 or isinstance(style, DividedInput | PerHead) or type(style) is Replicated:
        return []
    if isinstance(style, ReplicatedOnShards):
        sizes = [p.numel() * _itemsizes(p.dtype, keeps_dtype)[0] for p in module.parameters() if p.requires_grad]
        if isinstance(style, ReplicatedHeads) and isinstance(module, nn.Linear):
            sizes.append(tokens * module.in_features * _itemsizes(module.weight.dtype, keeps_dtype)[0])
        return [CollectiveCount("backward", "all_reduce", axis, len(sizes), sum(sizes))] if sizes else []
    if isinstance(style, Conv1DColwise | Conv1DRowwise):
        return _conv1d_counts(module, style, axis, tokens, keeps_dtype)
    # Other modules' inputs and outputs do not follow from the sizes of their parameters.
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
    own = by_layouts.get((style.input_layouts[0], style.output_layouts[0]))
    return None if own is None else own + _adapter_counts(module, isinstance(style, RowwiseParallel), axis, keeps_dtype)


def _adapter_counts(module: nn.Module, is_rowwise: bool, axis: str, keeps_dtype: bool) -> list[CollectiveCount]:
    """The additional collectives of a layer's LoRA adapter under torch's styles; none if the layer has no adapter."""
    if not isinstance(module, LoRALinear):
        return []
    magnitude = module.lora_magnitude
    whole = [module.lora_B.weight] if is_rowwise else [module.lora_A.weight]
    whole += [magnitude] if is_rowwise and magnitude is not None else []
    sizes = [x.numel() * _itemsizes(x.dtype, keeps_dtype)[0] for x in whole]
    counts = [CollectiveCount("backward", "all_reduce", axis, len(sizes), sum(sizes))]
    if is_rowwise and magnitude is not None:
        wide = max(_itemsizes(magnitude.dtype, keeps_dtype)[0], SUMMED)
        counts.append(CollectiveCount("forward", "all_reduce", axis, 1, magnitude.numel() * wide))
    return counts


def _conv1d_counts(
    module: nn.Module, style: ParallelStyle, axis: str, tokens: int, keeps_dtype: bool
) -> list[CollectiveCount]:
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
    itemsize = _itemsizes(weight.dtype, keeps_dtype)[0]
    if isinstance(style, Conv1DRowwise):
        return [CollectiveCount("forward", "all_reduce", axis, 1, tokens * weight.shape[1] * itemsize)]
    sizes = [tokens * weight.shape[0] * itemsize]
    if isinstance(style, Conv1DPackedColwise) and bias.requires_grad:
        sizes.append(bias.numel() * itemsize)
    return [CollectiveCount("backward", "all_reduce", axis, len(sizes), sum(sizes))]


def keeps_dtypes(model: nn.Module) -> bool:
    """Whether the default policy keeps every dtype: True for a model with a float64 parameter."""
    return any(parameter.dtype == torch.float64 for parameter in model.parameters())


def _padded_numel(shape: tuple[int, ...], ranks: int) -> int:
    """A parameter's number of elements after its first dim is rounded up to a multiple of the ranks."""
    return -(-shape[0] // ranks) * ranks * prod(shape[1:]) if shape else ranks


def _itemsizes(dtype: torch.dtype, keeps_dtype: bool) -> tuple[int, int]:
    """Bytes of an element when it is gathered, and of its gradient when it is reduced, under the default policy."""
    return (dtype.itemsize, dtype.itemsize) if keeps_dtype else (2, 4)
