"""A tower whose blocks share modules or weights, trained under FSDP and recomputation. No JAX: ranks run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_impl.parallelizer import fsdp2_strategy_parallelize, to_cpu

# The weight of each of three blocks and of the head, the shift of each block, and which blocks are one module.
# "both": the last block shares a parameter with each of two blocks that share none with each other.
WEIGHTS = {"apart": (0, 1, 2, 3), "module": (0, 1, 0, 3), "weight": (0, 1, 0, 3), "head": (0, 1, 2, 1)}
WEIGHTS["both"] = WEIGHTS["weight"]
SHIFTS = {**dict.fromkeys(WEIGHTS, (0, 1, 2)), "module": (0, 1, 0), "both": (0, 1, 1)}
MODULES = {**dict.fromkeys(WEIGHTS, (0, 1, 2)), "module": (0, 1, 0)}
FROZEN = {"none": (), "first": (0,), "middle": (1,), "whole middle": (1,)}  # weights; of a whole block also its shift
SCOPES: dict[str, dict[str, Any]] = {
    "none": {},
    "every": {"activation_checkpointing": True},
    "second": {"activation_checkpointing": "selective", "selective_ac_option": 2},
    "products": {"activation_checkpointing": "selective"},
}
SCALE = 2.0  # of the outputs, which are multiplied in place


def drawn_factors(seed: int | None) -> list[float]:
    """The random factor of each place in a forward that begins with this seed; 1 without a seed."""
    if seed is None:
        return [1.0] * 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [torch.rand(()).item() for _ in range(3)]


class Block(nn.Module):
    """x + tanh(x weight + shift) times a random factor; a cache collects the products over the calls of each place."""

    def __init__(self, weight: nn.Parameter, shift: nn.Parameter, is_random: bool) -> None:
        super().__init__()
        self.weight, self.shift = weight, shift
        self.is_random, self.runs = is_random, 0

    def forward(self, x: Tensor, cache: dict[int, Tensor] | None, place: int) -> Tensor:
        self.runs += 1
        product = x @ self.weight
        if cache is not None:
            product = cache[place] = torch.cat([cache[place], product]) if place in cache else product
        factor = torch.rand(()).to(x) if self.is_random else 1.0
        return x + torch.tanh(product + self.shift) * factor


class Tower(nn.Module):
    """Three blocks in one list or two, and a head; `shared` says which are one, `frozen` which are not trained."""

    def __init__(self, weights: Tensor, shifts: Tensor, shared: str, frozen: str, lists: int, seed: int | None) -> None:
        super().__init__()
        parameters = [nn.Parameter(x.clone(), requires_grad=k not in FROZEN[frozen]) for k, x in enumerate(weights)]
        *of_blocks, head = (parameters[k] for k in WEIGHTS[shared])
        of_shifts = [nn.Parameter(x.clone()) for x in shifts]
        pairs = zip(of_blocks, SHIFTS[shared], strict=True)
        blocks = [Block(weight, of_shifts[k], seed is not None) for weight, k in pairs]
        blocks[1].shift.requires_grad_(frozen != "whole middle")
        places = [blocks[k] for k in MODULES[shared]]
        end = len(places) if lists == 1 else 2
        self.layers, self.last_layers, self.head = nn.ModuleList(places[:end]), nn.ModuleList(places[end:]), head
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        cache = {} if self.config.use_cache else None
        for place, block in enumerate(self.places):
            x = block(x, cache, place)
        return ((x @ self.head).view(len(x), -1),)

    @property
    def places(self) -> list[Any]:
        """The block of each place."""
        return [*self.layers, *self.last_layers]


def gradients_of_steps(
    mesh: Any,
    x: Tensor,
    weights: Tensor,
    shifts: Tensor,
    scope: str,
    steps: int,
    tower: dict[str, Any],
    **switches: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(this rank's outputs; the gradients of weights and of shifts, 0 without one; how often the blocks have run).

    The gradients of each step by the mean of squares over all ranks are added.
    """
    model, shared = Tower(weights, shifts, **tower), tower["shared"]
    policy = None if weights.dtype == torch.float64 else MixedPrecisionPolicy()
    fsdp2_strategy_parallelize(model, mesh.device_mesh, policy, **SCOPES[scope], **switches)
    y = x
    for _ in range(steps):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(tower["seed"] or 0)
            y = model(x)[0].mul_(SCALE)
            y.square().mean().backward()
    d_weights, d_shifts = ([torch.zeros_like(each) for each in group] for group in (weights, shifts))
    holders = [block.weight for block in model.places] + [model.head]
    for k, parameter in dict(zip(WEIGHTS[shared], holders, strict=True)).items():
        if parameter.grad is not None:
            d_weights[k] = to_cpu(parameter.grad)
    for k, block in dict(zip(SHIFTS[shared], model.places, strict=True)).items():
        if block.shift.grad is not None:
            d_shifts[k] = to_cpu(block.shift.grad)
    runs = x.new_tensor(float(sum(block.runs for block in dict.fromkeys(model.places))))
    return y.detach(), torch.stack(d_weights), torch.stack(d_shifts), runs
