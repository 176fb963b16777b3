"""Losses of torch.nn.functional on DTensors that are sharded by rows, as a training step calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from parity_tests.evidence.peers.torch.shards import chunked, sharded
from shardproof import scheme, values

Pointwise = Callable[[Any, Any], Any]


def _huber(difference: Any, beta: float) -> Any:
    small = jnp.abs(difference) < beta
    return jnp.where(small, 0.5 * difference**2, beta * (jnp.abs(difference) - 0.5 * beta))


# For each loss: the mathematics of one element, and whether x and y are probabilities.
LOSSES: dict[str, tuple[Pointwise, bool, bool]] = {
    "mse_loss": (lambda x, y: (x - y) ** 2, False, False),
    "smooth_l1_loss": (lambda x, y: _huber(x - y, 1.0), False, False),
    "huber_loss": (lambda x, y: _huber(x - y, 1.0), False, False),
    "soft_margin_loss": (lambda x, y: jax.nn.softplus(-y * x), False, False),
    "binary_cross_entropy": (lambda x, y: -(y * jnp.log(x) + (1 - y) * jnp.log(1 - x)), True, True),
    "l1_loss": (lambda x, y: jnp.abs(x - y), False, False),
    "binary_cross_entropy_with_logits": (lambda x, y: jax.nn.softplus(x) - y * x, False, True),
    "kl_div": (lambda x, y: y * (jnp.log(y) - x), False, True),
    "poisson_nll_loss": (lambda x, y: jnp.exp(x) - y * x, False, False),
    "gaussian_nll_loss": (lambda x, y: 0.5 * (jnp.log(4.0) + (x - y) ** 2 / 4.0), False, False),
}
REDUCED = {"mean": jnp.mean, "sum": jnp.sum, "none": lambda x: x}


def _call(name: str, x: Any, y: Any, reduction: str) -> Any:
    if name == "gaussian_nll_loss":
        return F.gaussian_nll_loss(x, y, 4.0, reduction=reduction)
    return getattr(F, name)(x, y, reduction=reduction)


def _declare(name: str, reduction: str, layout: str) -> None:
    pointwise, x_probability, y_probability = LOSSES[name]

    def reference(x: Any, y: Any) -> Any:
        x = jax.nn.sigmoid(x) if x_probability else x
        y = jax.nn.sigmoid(y) if y_probability else y
        return REDUCED[reduction](pointwise(x, y))

    def loss(mesh: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = (sharded(mesh, part, 0, mesh.total("n")) for part in (x, y))
        x = x.sigmoid() if x_probability else x
        y = y.sigmoid() if y_probability else y
        value = _call(name, x, y, reduction)
        return value.redistribute(placements=[Shard(0)]).to_local() if reduction == "none" else value.full_tensor()

    rows = "n/dp c" if layout == "even" else "n/dp:chunked c"
    loss.__name__ = f"{name}_{reduction}_{layout}"
    scheme(
        reference=reference,
        mesh={"dp": (1, 2, 4)},
        inputs={"x": rows, "y": rows},
        outputs=rows if reduction == "none" else "dp=I",
        layouts={} if layout == "even" else {"chunked": chunked},
        nograd=("y",),
        draw={"x": values("normal", "zeros"), "y": values("normal", "ones")},
        dtypes=("float32",),
        roundings=4,
        reduction=() if reduction == "none" else ("n", "c"),
    )(loss)


for _name in LOSSES:
    for _reduction, _layout in (("mean", "even"), ("sum", "even"), ("mean", "uneven")):
        _declare(_name, _reduction, _layout)
_declare("mse_loss", "none", "uneven")
