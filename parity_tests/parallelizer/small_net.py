"""A net of two blocks and a head, small enough to be trained under every setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_impl.parallelizer import to_cpu, translate_to_torch_parallel_style

BLOCK = "parity_tests.parallelizer.small_net.Block"
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
NAMES = ("blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight", "head.weight")


class Block(nn.Module):
    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self, d: int = 3, f: int = 4, o: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(d, f), Block(d, f)])
        self.head = nn.Linear(d, o, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net_of(values: Mapping[str, Tensor]) -> Net:
    """A net with these values."""
    d, f = values["blocks.0.down.weight"].shape
    with torch.device("meta"):
        net = Net(d, f, len(values["head.weight"]))
    net.load_state_dict({name: nn.Parameter(value.clone()) for name, value in values.items()}, assign=True)
    return net


def plan() -> dict[str, Any]:
    return {key: translate_to_torch_parallel_style(name) for key, name in PLAN.items()}


def full_tensors(net: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """The full tensor of every parameter, or of its gradient; all ranks must call it."""
    return {name: to_cpu(p.grad if gradients else p.detach()) for name, p in net.named_parameters()}
