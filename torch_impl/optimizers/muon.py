"""Muon on sharded matrices: momentum and decay on each rank's shard, Newton-Schulz on the whole matrix.

    b <- mu b + (1 - mu) g,   d = mu b + (1 - mu) g   (Nesterov; else d = b)
    w <- w - eta (0.2 sqrt(max(m, n)) newton_schulz(d) + lambda w)

Everything but Newton-Schulz is elementwise. The leading dims of a parameter [..., m, n] are a batch of matrices, as for
experts; `rows` are the heights of matrices that are stacked in one parameter, such as q, k and v. A DTensor's
placements tell whether its matrices are sharded by rows, by columns, by the batch (then each matrix is whole on one
rank), or not at all.
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
from torch_impl.optimizers.parameters import Parameters

RMS = 0.2  # an update's root mean square, about AdamW's; an orthogonal matrix [m, n] has 1 / sqrt(max(m, n))


class Muon(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982) for local and sharded matrices; leave vectors and embeddings to AdamW.

    `params` are tensors or parameter groups, as for torch's optimizers; `lr`, `weight_decay`, `momentum` and `nesterov`
    are as in `torch.optim.Muon`, and the state has the same keys. Groups may differ in each of these, and in:

    - `rows`: the heights of the matrices stacked in a parameter, such as (q, k, v); None for one matrix
    - `steps`: the number of Newton-Schulz steps
    - `dtype`: the dtype of its products; None for float32 or wider (other libraries use torch.bfloat16)
    - `route`: how sharded matrices are exchanged: "owners", "sharded", or None for fewer bytes (`fewest_bytes`)

    All matrices of a parameter group are exchanged at once; several groups take less memory and more calls.
    A DTensor that is sharded over several axes, as under FSDP and tensor parallelism, is gathered over all but one of
    them. A parameter must have a gradient on every rank of its mesh or on none.

    Cost:   for all matrices sharded over one group of ranks: "owners" 2 all_to_all, one of this rank's shards, one of
            the matrices that it owns; "sharded" 1 all_reduce of a float64 for each matrix, and `steps` all_reduces of
            k (k + 1) / 2 elements, float32 or wider, for each matrix, where k is the unsharded dim. A parameter sharded
            over several axes also takes an all_gather over all of them but one. Matrices on one rank send nothing.
    Errors: TypeError and ValueError for a parameter that is not a matrix, `rows` that do not add up to a parameter's
            rows, an unknown `route` or a number out of range; `step` raises ValueError for a gradient whose placements
            differ from its parameter's.
    """

    @contract
    def __init__(
        self,
        params: Parameters,
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
        """Add the parameter group `param_group`, as in torch's optimizers. Errors: as for the class."""
        super().add_param_group(param_group)
        index, added = len(self.param_groups) - 1, self.param_groups[-1]
        for i, each in enumerate(added["params"]):
            _validate_matrices(f"params[{i}] of group {index}", each, added["rows"])
        if not 0 <= added["momentum"] < 1:
            raise Rejected(f"momentum={added['momentum']} must be at least 0 and below 1")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the loss that `closure` returned, or None.

        Cost:   as for the class.
        Errors: ValueError for a gradient whose placements differ from its parameter's, before anything is sent or
                changed.
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
                # A sum in 16 bits would round the learning rate to them first, on a CPU.
                wide = weight.to(accumulator(weight.dtype))
                wide.mul_(1 - group["lr"] * group["weight_decay"])
                wide.add_(update.placed_as_parameter(), alpha=-group["lr"])
                weight.copy_(wide)
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update this rank's shard of the momentum, and return its shard of d."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, buffer = _local_gradient(parameter), local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()


@dataclass(frozen=True)
class _Block:
    """A view [..., s, k] of some of an update's matrices; `shape` is the shape of each full matrix.

    If the rows are sharded over `group`, `lengths` has every rank's number of rows and s is this rank's. With no
    lengths the full matrices are on this rank.
    """

    view: Tensor
    shape: tuple[int, int]
    group: ProcessGroup | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Update:
    """The update of a parameter: d at first, then overwritten in place by its orthogonalized matrices.

    `local` is this rank's part of a tensor with these `placements`: the parameter's, except that at most one mesh axis
    shards the two dims of the matrices.
    """

    parameter: Tensor
    local: Tensor
    placements: tuple[Any, ...]
    axis: int | None  # of the mesh, over which rows or columns are sharded

    @classmethod
    def of(cls, parameter: Tensor, direction: Tensor, dtype: torch.dtype | None) -> _Update:
        if dtype is not None and dtype.itemsize < direction.dtype.itemsize:
            direction = direction.to(dtype)  # send no more digits than the products use
        direction = direction.contiguous()  # blocks are views that are written in place
        if not isinstance(parameter, DTensor):
            return cls(parameter, direction, (), None)
        axes = [i for i, each in enumerate(parameter.placements) if _shards_matrices(each, parameter, i)]
        # Keep an axis with a plain Shard: where FSDP shards a tensor-parallel dim, a rank's rows are not consecutive.
        axis = next((i for i in axes if isinstance(parameter.placements[i], Shard)), None)
        other_axes = [i for i in axes if i != axis]
        placements = tuple(Replicate() if i in other_axes else each for i, each in enumerate(parameter.placements))
        if other_axes:
            direction = _redistributed(parameter, direction, parameter.placements, placements).contiguous()
        return cls(parameter, direction, placements, axis)

    def placed_as_parameter(self) -> Tensor:
        """This rank's shard of the update, with the parameter's placements."""
        if not isinstance(self.parameter, DTensor) or self.placements == tuple(self.parameter.placements):
            return self.local
        return _redistributed(self.parameter, self.local, self.placements, self.parameter.placements)

    def blocks(self, rows: Sequence[int] | None) -> Iterator[_Block]:
        """The update's matrices: a block for each entry of `rows`, and one for each matrix if they are sharded."""
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
    """Orthogonalize and scale every matrix of the updates in place, in one exchange for each group of ranks."""
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
        # Equal meshes have different groups of the same ranks: exchange their matrices together.
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
    """Whether a placement shards rows or columns over more than one rank."""
    is_sharded = not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    return is_sharded and placement.dim >= parameter.ndim - 2


def _overlaps(lengths: Sequence[int], low: int, high: int) -> list[tuple[int, int]]:
    """The range of each rank's rows that lies in [low, high), counted from the rank's first row."""
    bounds, first = [], 0
    for length in lengths:
        bounds.append(tuple(min(max(row - first, 0), length) for row in (low, high)))
        first += length
    return bounds


def _redistributed(parameter: DTensor, local: Tensor, before: Sequence[Any], after: Sequence[Any]) -> Tensor:
    """This rank's part of a tensor of the parameter's shape, redistributed to other placements."""
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
            f"rows={tuple(rows)} are not the rows of {label}, which has {parameter.shape[-2]}; "
            "pass the height of each matrix"
        )


def _local_gradient(parameter: Tensor) -> Tensor:
    """This rank's shard of the parameter's gradient, which must exist."""
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
