"""The norm of a whole model's gradient, however its parameters are cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from torch_impl.collectives import accumulator


def gradient_norm(parameters: Iterable[nn.Parameter], pp: ProcessGroup | None = None) -> Float[Tensor, ""]:
    """sqrt(sum of squares) over all gradients, the same on every rank; a parameter without one counts nothing.

    What is cut is summed over the axes that cut it, what is repeated is counted once, as its DTensor says. Where the
    ranks of `pp` have other parameters each, theirs are added; of one that two stages share pass one copy alone
    (`pipelining.ties.named_once`).

    Cost:   1 all_reduce of one number for each axis of each way in which parameters are cut, and 1 over pp.
    Errors: ValueError for a gradient that is still a sum of addends.
    """
    parameters = list(parameters)
    squares: dict[tuple[tuple[int, ...], ...], tuple[tuple[ProcessGroup, ...], list[Tensor]]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups = _cut_by(gradient)
        # By their ranks: of equal meshes DTensor may give either, each with groups of its own, on one rank and not all.
        key = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
        squares.setdefault(key, (groups, []))[1].append(local.to(accumulator(local.dtype)).square().sum())
    total = torch.zeros(())
    for parameter in parameters:  # the same dtype on every rank, whichever gradients it has
        total = total.to(parameter.device, torch.promote_types(total.dtype, parameter.dtype))
    for groups, parts in squares.values():
        own = torch.stack(parts).sum()
        for group in groups:
            dist.all_reduce(own, group=group)
        total = total + own
    if pp is not None:
        dist.all_reduce(total, group=pp)
    return total.sqrt()


def _cut_by(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """The groups of the axes that cut a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"models.gradient_norm: a gradient is {gradient.placements}; reduce it first")
    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(axis) for axis in cut)
