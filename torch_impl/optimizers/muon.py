"""Muon on matrices of which ranks have shards: momentum on the shard, Newton-Schulz on the matrix, decay on the shard.

    b <- mu b + (1 - mu) g,   d = mu b + (1 - mu) g   (Nesterov; else d = b)
    w <- w - eta (0.2 sqrt(max(m, n)) newton_schulz(d) + lambda w)

Everything but Newton-Schulz is elementwise. Of a parameter [..., m, n] the leading dims are a batch of matrices, as
experts are, and `rows` are the heights of matrices that are fused one above the other, as q, k and v. A DTensor says
how its matrices are sharded: over rows, over columns, over the batch, whose matrices need no other rank, or not at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_impl.collectives import accumulator
from torch_impl.contract import Dtype, NonNegative, PositiveInt, Rejected, contract
from torch_impl.optimizers.dtensor_shards import chunk_lengths, local_tensor
from torch_impl.optimizers.newton_schulz import (
    STEPS,
    Route,
    ShardedMatrix,
    fewest_bytes,
    orthogonalized,
    orthogonalized_by_owners,
    orthogonalized_in_shards,
)

RMS = 0.2  # of an update, about that of AdamW's; an orthogonal matrix [m, n] has 1 / sqrt(max(m, n))


class Muon(torch.optim.Optimizer):
    """Muon of arXiv 2502.16982, for matrices on one rank and for DTensors; AdamW steps vectors and embeddings.

    `params` are tensors or groups of them, as torch's optimizers take; `lr`, `weight_decay`, `momentum` and `nesterov`
    are those of `torch.optim.Muon`, whose state it shares. Each may differ between groups, and so may

    - `rows`: heights of the matrices that a parameter has one above the other, (q, k, v); None for one matrix
    - `steps` of Newton-Schulz
    - `dtype` of its products; None for float32 or wider, torch.bfloat16 is what others use
    - `route` of sharded matrices: "owners", "sharded", or None for the one that sends fewer bytes (`fewest_bytes`)

    All matrices of a parameter group are exchanged at once; several groups take less memory and more calls.
    A DTensor that is sharded over several axes, as under FSDP and tensor parallelism, is gathered over all but one of
    them. Every rank of a parameter's mesh has a gradient of it, or none has.

    Cost:   for all matrices of one group of ranks together: "owners" 2 all_to_all, one of this rank's shards, one of
            the matrices that it owns; "sharded" 1 all_reduce of a float64 for each matrix, and `steps` of
            k (k + 1) / 2 float32 or wider for each, k being the dim that is not sharded. Besides, for each parameter
            that is sharded over several axes an all_gather over each but one. Matrices on one rank send nothing.
    Errors: TypeError and ValueError for what is no matrix, for `rows` that are not those of a parameter, for another
            `route`, for numbers out of range; in `step` ValueError for a gradient that is not placed as its parameter.
    """

    @contract
    def __init__(
        self,
        params: Any,
        lr: NonNegative = 1e-3,
        weight_decay: NonNegative = 0.1,
        momentum: NonNegative = 0.95,
        nesterov: bool = True,
        *,
        rows: Sequence[int] | None = None,
        steps: PositiveInt = STEPS,
        dtype: Dtype | None = None,
        route: Route | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**defaults, "rows": rows, "steps": steps, "dtype": dtype, "route": route})

    @contract("optimizers.Muon")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, `param_group`, as torch's optimizers do. Errors: those of the class."""
        super().add_param_group(param_group)
        index, added = len(self.param_groups) - 1, self.param_groups[-1]
        for i, each in enumerate(added["params"]):
            _validate_matrices(f"params[{i}] of group {index}", each, added["rows"])
        if not 0 <= added["momentum"] < 1:
            raise Rejected(f"momentum={added['momentum']} must be at least 0 and below 1")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; returns the loss of `closure`, if there is one.

        Cost:   that of the class.
        Errors: ValueError for a gradient that is not placed as its parameter, before anything is sent or changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for parameter in (p for parameters in updated for p in parameters):
            _validate_gradient(parameter)
        for group, parameters in zip(self.param_groups, updated, strict=True):
            updates = [_Update.of(p, self._direction(p, group), group["dtype"]) for p in parameters]
            _orthogonalize(updates, group)
            for update in updates:
                weight = local_tensor(update.parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.placed_as_parameter(), alpha=-group["lr"])
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's shard of d, after its shard of the momentum has taken the gradient in."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, buffer = _local_gradient(parameter), local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()


@dataclass(frozen=True)
class _Block:
    """Some of the matrices of an update, as a view of it, [..., s, k]; shape is that of each full matrix.

    With `lengths`, the rows of every rank of `group`, s is one of them; without, the matrices are on this rank.
    """

    view: Tensor
    shape: tuple[int, int]
    group: ProcessGroup | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Update:
    """What a parameter is to be changed by: d at first, overwritten by its matrices once they are orthogonal.

    `local` is this rank's part of a tensor that is placed as `placements` say: as the parameter, but sharded over one
    axis at most in the two dims of the matrices.
    """

    parameter: Tensor
    local: Tensor
    placements: tuple[Any, ...]
    axis: int | None  # of the mesh, over which rows or columns are sharded

    @classmethod
    def of(cls, parameter: Tensor, direction: Tensor, dtype: torch.dtype | None) -> _Update:
        if dtype is not None and dtype.itemsize < direction.dtype.itemsize:
            direction = direction.to(dtype)  # matrices are sent with no more digits than are computed with
        direction = direction.contiguous()  # its matrices are views, which are written
        if not isinstance(parameter, DTensor):
            return cls(parameter, direction, (), None)
        axes = [i for i, each in enumerate(parameter.placements) if _shards_matrices(each, parameter, i)]
        # Of several axes a plain Shard stays: what FSDP shards of a tensor-parallel dim are no rows in a row.
        axis = next((i for i in axes if isinstance(parameter.placements[i], Shard)), None)
        other_axes = [i for i in axes if i != axis]
        placements = tuple(Replicate() if i in other_axes else each for i, each in enumerate(parameter.placements))
        if other_axes:
            direction = _redistributed(parameter, direction, parameter.placements, placements).contiguous()
        return cls(parameter, direction, placements, axis)

    def placed_as_parameter(self) -> Tensor:
        """This rank's shard of the update."""
        if not isinstance(self.parameter, DTensor) or self.placements == tuple(self.parameter.placements):
            return self.local
        return _redistributed(self.parameter, self.local, self.placements, self.parameter.placements)

    def blocks(self, rows: Sequence[int] | None) -> Iterator[_Block]:
        """The matrices, those of `rows` each for itself; sharded ones one by one."""
        *_, m, n = self.parameter.shape
        heights = [m] if rows is None else rows
        spans = [(sum(heights[:i]), sum(heights[: i + 1])) for i in range(len(heights))]
        if self.axis is None:
            yield from (_Block(self.local[..., low:high, :], (high - low, n)) for low, high in spans)
            return
        mesh = self.parameter.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        group = mesh.get_group(self.axis)
        dim = self.placements[self.axis].dim
        lengths = chunk_lengths(self.parameter.shape[dim], group.size())
        *batch, height, width = self.local.shape
        for matrix in self.local.view(math.prod(batch), height, width):
            for low, high in spans:
                if dim == self.parameter.ndim - 1:
                    yield _Block(matrix[low:high].mT, (high - low, n), group, lengths)
                    continue
                inside = _overlaps(lengths, low, high)
                heights_inside = tuple(stop - start for start, stop in inside)
                yield _Block(matrix[slice(*inside[group.rank()])], (high - low, n), group, heights_inside)


def _orthogonalize(updates: Sequence[_Update], settings: dict[str, Any]) -> None:
    """Replace every matrix of the updates by its orthogonal one, scaled; those of one group of ranks together."""
    exchanges: dict[Any, list[_Block]] = defaultdict(list)
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    for block in (block for update in updates for block in update.blocks(settings["rows"])):
        dtype = settings["dtype"] or accumulator(block.view.dtype)
        if block.group is None:
            _write(block, orthogonalized(block.view, settings["steps"], dtype))
            continue
        s, k = sum(block.lengths), block.view.shape[1]
        itemsize = block.view.dtype.itemsize
        route = settings["route"] or fewest_bytes(s, k, block.group.size(), steps=settings["steps"], itemsize=itemsize)
        # Two equal meshes have groups of the same ranks.
        ranks = tuple(dist.get_process_group_ranks(block.group))
        groups.setdefault(ranks, block.group)
        exchanges[ranks, route, block.view.dtype, dtype].append(block)
    for (ranks, route, _, dtype), blocks in exchanges.items():
        matrices = [ShardedMatrix(block.view, block.lengths) for block in blocks]
        by_route = orthogonalized_by_owners if route == "owners" else orthogonalized_in_shards
        for block, result in zip(blocks, by_route(matrices, groups[ranks], settings["steps"], dtype), strict=True):
            _write(block, result)


def _write(block: _Block, result: Tensor) -> None:
    block.view.copy_(result * (RMS * math.sqrt(max(block.shape))))


def _shards_matrices(placement: Any, parameter: DTensor, axis: int) -> bool:
    """Whether a placement shards rows or columns; over one rank nothing is sharded."""
    is_sharded = not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    return is_sharded and placement.dim >= parameter.ndim - 2


def _overlaps(lengths: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
    """Of each rank's rows those in [low, high), counted from the rank's first."""
    bounds, first = [], 0
    for length in lengths:
        bounds.append(tuple(min(max(row - first, 0), length) for row in (low, high)))
        first += length
    return bounds


def _redistributed(parameter: DTensor, local: Tensor, before: Sequence[Any], after: Sequence[Any]) -> Tensor:
    """This rank's part of a tensor like the parameter, once it is placed otherwise."""
    shape, stride = parameter.shape, parameter.stride()
    placed = DTensor.from_local(local, parameter.device_mesh, before, run_check=False, shape=shape, stride=stride)
    return placed.redistribute(placements=list(after)).to_local()


def _validate_matrices(label: str, parameter: Tensor, rows: Sequence[int] | None) -> None:
    """Errors: ValueError."""
    if parameter.ndim < 2:
        raise Rejected(
            f"{label} is {list(parameter.shape)} and no matrix; step vectors with torch.optim.AdamW "
            "(parameter_kinds separates them)"
        )
    if rows is not None and (sum(rows) != parameter.shape[-2] or min(rows) < 1):
        raise Rejected(
            f"rows={tuple(rows)} are not those of {label}, which has {parameter.shape[-2]}; "
            "pass the height of each matrix"
        )


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of the gradient of a parameter that has one."""
    gradient: Any = parameter.grad
    return local_tensor(gradient)


def _validate_gradient(parameter: Tensor) -> None:
    """Errors: ValueError."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and getattr(gradient, "placements", None) != parameter.placements:
        raise ValueError(
            f"optimizers.Muon: a gradient is {getattr(gradient, 'placements', 'no DTensor')}, its parameter is "
            f"{parameter.placements}; redistribute it first, with "
            "parameter.grad = parameter.grad.redistribute(placements=parameter.placements)"
        )
