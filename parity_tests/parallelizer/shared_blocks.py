"""A tower whose blocks share modules or weights, trained for a step under FSDP. No JAX: ranks run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_impl.parallelizer import fsdp2_strategy_parallelize, to_cpu

# The weight of each of three blocks and of the head, and which blocks are one module.
WEIGHTS = {"apart": (0, 1, 2, 3), "module": (0, 1, 0, 3), "weight": (0, 1, 0, 3), "head": (0, 1, 2, 1)}
FROZEN = {"none": (), "first": (0,), "middle": (1,)}


class Block(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


class Tower(nn.Module):
    """Three blocks and a head; `shared` says which of them are one, `frozen` which weights are not trained."""

    def __init__(self, weights: Tensor, shared: str, frozen: str) -> None:
        super().__init__()
        parameters = [nn.Parameter(x.clone(), requires_grad=k not in FROZEN[frozen]) for k, x in enumerate(weights)]
        first, middle, last, head = (parameters[k] for k in WEIGHTS[shared])
        blocks = [Block(first), Block(middle), Block(last)]
        self.layers = nn.ModuleList([*blocks[:2], blocks[0] if shared == "module" else blocks[2]])
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x @ self.head


def gradients_of_step(
    mesh: Any, x: Tensor, weights: Tensor, shared: str, frozen: str, recomputed: bool
) -> tuple[Tensor, Tensor]:
    """(this rank's outputs, the gradients of all weights by the mean of squares over all ranks); 0 without one."""
    model = Tower(weights, shared, frozen)
    policy = None if weights.dtype == torch.float64 else MixedPrecisionPolicy()
    model = fsdp2_strategy_parallelize(model, mesh.device_mesh, policy, activation_checkpointing=recomputed)
    y = model(x)
    y.square().mean().backward()
    found = [torch.zeros_like(each) for each in weights]
    holders = [block.weight for block in model.layers] + [model.head]
    for k, parameter in dict(zip(WEIGHTS[shared], holders, strict=True)).items():
        if parameter.grad is not None:
            found[k] = to_cpu(parameter.grad)
    return y.detach(), torch.stack(found)
