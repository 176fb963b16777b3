"""torch.distributed.tensor.parallel: plans of modules, and loss_parallel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.func import functional_call

from parity_tests.evidence.peers.torch.shards import replicated, sharded
from shardproof import ids, scheme, token_below, values

NORMAL = values("normal")
TP = {"tp": (1, 2, 4)}


# Losses of logits that are sharded along the vocabulary.
def _token_losses(logits: Any, target: Any) -> Any:
    safe = jnp.where(target < 0, 0, target)
    picked = jnp.take_along_axis(logits, safe[..., None], -1)[..., 0]
    return jnp.where(target < 0, 0.0, jax.nn.logsumexp(logits, -1) - picked)


def cross_entropy(logits: Any, target: Any, reduction: str) -> Any:
    losses = _token_losses(logits, target)
    if reduction == "none":
        return losses
    return losses.sum() / ((target >= 0).sum().astype(losses.dtype) if reduction == "mean" else 1.0)


def _declare_loss(reduction: str, ignored: bool) -> None:
    def loss(mesh: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        full_logits = sharded(mesh, logits, 1, mesh.total("v"))
        value = F.cross_entropy(full_logits, target, reduction=reduction)
        return value.full_tensor() if isinstance(value, DTensor) else value

    loss.__name__ = f"loss_parallel_{reduction}" + ("_ignored" if ignored else "")
    scheme(
        reference=lambda logits, target: cross_entropy(logits, target, reduction),
        mesh=TP,
        inputs={"logits": "n v/tp", "target": "n"},
        outputs="n tp=I" if reduction == "none" else "tp=I",
        draw={"logits": NORMAL, "target": ids("v", ignore=-100) if ignored else token_below("v")},
        around=lambda mesh: loss_parallel(),
        dtypes=("float32",),
        roundings=4,
        reduction=("v", "n"),
    )(loss)


for _reduction in ("mean", "sum", "none"):
    _declare_loss(_reduction, ignored=False)
_declare_loss("sum", ignored=True)


# Plans of a module, its parameters given as the ranks' shards.
class Mlp(nn.Module):
    """A norm and two linear layers, sharded by a plan."""

    def __init__(self, d: int, f: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, f)
        self.down = nn.Linear(f, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(self.norm(x))))


PLANS = {
    "replicated": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}


def _mlp(x: Any, scale: Any, shift: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    x = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale[None, None] + shift[None, None]
    return jax.nn.silu(x @ up.T + up_bias[None, None]) @ down.T + down_bias[None, None]


def _declare_plan(name: str) -> None:
    rows = "b s/tp d" if name == "sequence" else "b s d tp=I"

    def module(mesh: Any, x: Any, scale: Any, shift: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
        on = mesh.device_mesh
        with torch.device("meta"):
            model = parallelize_module(Mlp(x.shape[-1], mesh.total("f")), on, PLANS[name])
        parameters = {"norm.weight": scale, "norm.bias": shift, "up.weight": up, "up.bias": up_bias}
        parameters |= {"down.weight": down, "down.bias": down_bias}
        for parameter, meant in model.named_parameters():
            if isinstance(meant, DTensor):
                parameters[parameter] = DTensor.from_local(parameters[parameter], on, meant.placements, run_check=False)
        return functional_call(model, parameters, (x,))

    module.__name__ = f"plan_{name}"
    scheme(
        reference=_mlp,
        mesh=TP,
        inputs={
            "x": rows,
            "scale": "d tp=I",
            "shift": "d tp=I",
            "up": "f/tp d",
            "up_bias": "f/tp",
            "down": "d f/tp",
            "down_bias": "d tp=I",
        },
        outputs=rows,
        dims={"b": (1, 2), "s": (4, 8), "d": (4, 6), "f": (8, 16)},
        draw={each: NORMAL for each in ("x", "scale", "shift", "up", "up_bias", "down", "down_bias")},
        dtypes=("float32",),
        roundings=6,
        reduction=("b", "s", "d", "f"),
    )(module)


for _name in PLANS:
    _declare_plan(_name)


@scheme(
    mesh=TP,
    inputs={name: "b s d tp=I" for name in ("x", "w")},
    outputs="b s tp=I",
    reference=lambda x, w: (x * w).sum(-1),
    draw={"x": NORMAL, "w": NORMAL},
    dtypes=("float32",),
    reduction=("d",),
)
def einsum_of_replicated(mesh: Any, x: Any, w: Any) -> torch.Tensor:
    return torch.einsum("bsd,bsd->bs", replicated(mesh, x), replicated(mesh, w)).full_tensor()
