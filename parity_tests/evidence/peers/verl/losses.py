"""verl's losses of responses: their aggregation over data-parallel ranks, and means over masked tokens.

FSDP takes the mean of the ranks' gradients, so a loss here is a rank's term: what `agg_loss` returns over the number of
ranks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
import torch.distributed as dist
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import torch_functional

from shardproof import integers, scheme, values

NORMAL = values("normal")
DP = {"dp": (1, 2, 4)}
MASKED = dict(
    mesh=DP,
    inputs={"losses": "n/dp t", "mask": "n/dp t"},
    draw={"losses": NORMAL, "mask": integers(0, 1)},
    dtypes=("float32",),
    roundings=4,
    reduction=("n", "t"),
)


def _total(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, group=mesh["dp"])
    return total


def _rows(mask: Any) -> Any:
    return (mask.sum(-1) > 0).astype(float)


def token_mean(losses: Any, mask: Any) -> Any:
    return jnp.where(mask == 1, losses, 0.0).sum() / jnp.maximum(mask.sum(), 1).astype(losses.dtype)


def token_sum(losses: Any, mask: Any) -> Any:
    return jnp.where(mask == 1, losses, 0.0).sum()


def mean_of_sums(losses: Any, mask: Any) -> Any:
    """Over the rows that have a token."""
    return jnp.where(mask == 1, losses, 0.0).sum() / jnp.maximum(_rows(mask).sum(), 1.0)


def mean_of_sums_over_width(losses: Any, mask: Any) -> Any:
    return mean_of_sums(losses, mask) / losses.shape[1]


def mean_of_means(losses: Any, mask: Any) -> Any:
    means = jnp.where(mask == 1, losses, 0.0).sum(-1) / jnp.maximum(mask.sum(-1), 1).astype(losses.dtype)
    return means.sum() / jnp.maximum(_rows(mask).sum(), 1.0)


REFERENCES = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": mean_of_sums,
    "seq-mean-token-sum-norm": mean_of_sums_over_width,
    "seq-mean-token-mean": mean_of_means,
}


def aggregated(mesh: Any, losses: torch.Tensor, mask: torch.Tensor, mode: str, width: int | None) -> torch.Tensor:
    """This rank's term of the loss of all rows, whose tokens and rows are counted over the ranks."""
    ranks = mesh.size("dp")
    tokens = _total(mask.sum(), mesh).clamp_min(1)
    rows = _total((mask.sum(-1) > 0).float().sum(), mesh).clamp_min(1.0)
    options = dict(dp_size=ranks, batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=width)
    return agg_loss(losses, mask.float(), mode, **options) / ranks


def _declare(mode: str) -> None:
    name = f"agg_loss_{mode.replace('-', '_')}"

    def loss(mesh: Any, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return aggregated(mesh, losses, mask, mode, losses.shape[1])

    def loss_with_nan(mesh: Any, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return aggregated(mesh, losses.masked_fill(mask == 0, float("nan")), mask, mode, losses.shape[1])

    loss.__name__, loss_with_nan.__name__ = name, f"{name}_of_nan_where_masked"
    for function in (loss, loss_with_nan):
        scheme(reference=REFERENCES[mode], outputs="dp=P", **MASKED)(function)


for _mode in REFERENCES:
    _declare(_mode)


@scheme(reference=mean_of_sums_over_width, outputs="dp=P", **MASKED)
def agg_loss_over_the_width_of_a_rank(mesh: Any, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each rank pads to the longest of its own responses, as a micro-batch is, and gives no `loss_scale_factor`."""
    used = mask.sum(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    return aggregated(mesh, losses[:, :width], mask[:, :width], "seq-mean-token-sum-norm", None)


# Means over all ranks, of values without a gradient. They are over the default group, by its manual.
WORLD = {
    **MASKED,
    "nograd": ("losses",),
    "excluded_conditions": ("larger_world", "int32", "autocast", "second_derivative"),
}


@scheme(reference=token_mean, outputs="dp=I", assume=lambda case: case.n > 0, **WORLD)
def distributed_masked_mean(mesh: Any, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    some = torch.ones((), dtype=losses.dtype)  # of no tokens verl's mean is 0/0, and the reference's is 0
    tokens = _total(mask.sum(), mesh)
    return torch.where(tokens > 0, torch_functional.distributed_masked_mean(losses, mask), 0.0) * some
