"""FSDP2's divisor of gradients, as expert parallelism sets it, on meshes of one rank and of several."""

from __future__ import annotations

from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardproof import scheme, values

NORMAL = values("normal")
FACTOR = 4.0


def _gradient(x: Any, weight: Any) -> Any:
    return jax.grad(lambda weight: (x @ weight.T).sum())(weight) / FACTOR


class _Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def gradient(mesh: Any, x: torch.Tensor, weight: torch.Tensor, as_sums: bool, reduced_in: torch.dtype) -> torch.Tensor:
    """The gradient of the sum of a layer's outputs over all rows, divided by FACTOR."""
    layer = fully_shard(
        _Layer(weight), mesh=mesh.device_mesh["edp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced_in)
    )
    layer.set_gradient_divide_factor(FACTOR)
    layer.set_force_sum_reduction_for_comms(as_sums)
    layer(x).sum().backward()
    return layer.weight.grad.full_tensor()


STEP = dict(
    reference=_gradient,
    inputs={"x": "b/edp d", "weight": "f d"},
    outputs="f d edp=I",
    dims={"b": (4, 8), "f": (4, 8)},
    nograd=("x", "weight"),
    draw={"x": NORMAL, "weight": NORMAL},
    dtypes=("float32",),
    roundings=4,
    reduction=("b",),
)


@scheme(mesh={"edp": (2, 4)}, **STEP)
def divided_as_sums(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gradient(mesh, x, weight, True, torch.float32)


@scheme(mesh={"edp": (1,)}, **STEP)
def divided_as_sums_on_a_mesh_of_one(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gradient(mesh, x, weight, True, torch.float32)


@scheme(mesh={"edp": (1,)}, **STEP)
def divided_on_a_mesh_of_one(mesh: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gradient(mesh, x, weight, False, torch.float32)
