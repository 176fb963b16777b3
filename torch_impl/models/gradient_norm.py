"""The norm of a whole model's gradient, however its parameters are cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_impl.collectives import accumulator


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
    """sqrt(sum of squares) over all gradients, the same on every rank; a parameter without one counts nothing.

    What is cut is summed over the axes that cut it, what is repeated is counted once, as its DTensor says.

    Cost:   1 all_reduce of one number for each axis of each way in which parameters are cut.
    Errors: ValueError for a gradient that is still a sum of addends.
    """
    squares: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares.setdefault(_cut_by(gradient), []).append(local.to(accumulator(local.dtype)).square().sum())
    total = torch.zeros(())
    for (mesh, axes), parts in squares.items():
        own = torch.stack(parts).sum()
        for axis in axes if mesh is not None else ():
            dist.all_reduce(own, group=mesh.get_group(axis))
        total = total.to(own) + own
    return total.sqrt()


def _cut_by(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh of a gradient and the axes that cut it."""
    if not isinstance(gradient, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"models.gradient_norm: a gradient is {gradient.placements}; reduce it first")
    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return gradient.device_mesh, tuple(cut)
