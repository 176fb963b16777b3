"""torch's RowwiseParallel for an input whose width the ranks do not share equally."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel


class Rowwise(RowwiseParallel):
    """`rowwise`: as in torch, but a local input is a part of the layer's `in_features`, whatever its own width.

        input  "... i/tp"   weight  "o i/tp"   bias  "o tp=I", added once   ->   "... o tp=I"

    torch takes the input for one of equal parts, and refuses the product where they are not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made = super()._apply(module, device_mesh)
        if isinstance(module, nn.Linear) and self.input_layouts == (Shard(-1),):
            module.register_forward_pre_hook(partial(_with_width, device_mesh), prepend=True)
        return made


def _with_width(mesh: DeviceMesh, module: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    if isinstance(x, DTensor):
        return args
    shape = torch.Size((*x.shape[:-1], module.in_features))
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(x, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
    return (cut, *others)
