"""torchtitan's cross entropy of sharded logits, its sums over a mesh, and its clipping of gradients."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.loss import _LossParallelCrossEntropy, cross_entropy_loss
from torchtitan.distributed import utils

from parity_tests.evidence.peers.mathematics import token_losses
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import ids, scheme, values

NORMAL = values("normal")
LOSS = dict(
    draw={"logits": NORMAL, "labels": ids("v", ignore=-100)},
    dtypes=("float32",),
    roundings=6,
    reduction=("b", "s", "v"),
    **CONTIGUOUS,
)
TP = dict(mesh={"tp": (1, 2, 4)}, inputs={"logits": "b s v/tp", "labels": "b s"}, **LOSS)


def _sum(logits: Any, labels: Any) -> Any:
    return token_losses(logits, labels).sum()


def _tokens(logits: Any, labels: Any) -> Any:
    return token_losses(logits, labels).reshape(-1)


@scheme(reference=_sum, outputs="tp=I", **TP)
def loss_parallel_sum(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _LossParallelCrossEntropy.apply(logits, labels, mesh["tp"], logits.shape[-1] * mesh.size("tp"))


@scheme(reference=_tokens, outputs="(b s) tp=I", **TP)
def loss_parallel_of_tokens(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _LossParallelCrossEntropy.apply(logits, labels, mesh["tp"], logits.shape[-1] * mesh.size("tp"), "none")


def _dtensors(mesh: Any, logits: torch.Tensor, labels: torch.Tensor, dim: int) -> tuple[DTensor, DTensor]:
    placement = Replicate() if dim == 2 else Shard(dim)
    device_mesh = mesh.device_mesh
    return DTensor.from_local(logits, device_mesh, [Shard(dim)]), DTensor.from_local(labels, device_mesh, [placement])


@scheme(reference=_sum, outputs="tp=I", **TP)
def cross_entropy_of_a_sharded_vocabulary(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy_loss(*_dtensors(mesh, logits, labels, 2)).to_local()


@scheme(
    reference=_sum, outputs="dp=P", mesh={"dp": (1, 2, 4)}, inputs={"logits": "b/dp s v", "labels": "b/dp s"}, **LOSS
)
def cross_entropy_of_sharded_rows(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy_loss(*_dtensors(mesh, logits, labels, 0)).to_local()


@scheme(
    reference=_sum, outputs="cp=P", mesh={"cp": (1, 2, 4)}, inputs={"logits": "b s/cp v", "labels": "b s/cp"}, **LOSS
)
def cross_entropy_of_a_sharded_sequence(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy_loss(*_dtensors(mesh, logits, labels, 1)).to_local()


@scheme(
    reference=_sum, outputs="dp=P", mesh={"dp": (1, 2, 4)}, inputs={"logits": "b/dp s v", "labels": "b/dp s"}, **LOSS
)
def cross_entropy_of_own_rows(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy_loss(logits, labels)


# Sums and clipping, without a gradient
OVER_RANKS = dict(
    mesh={"dp": (1, 2, 4)},
    outputs="dp=I",
    inputs={"x": "n/dp"},
    nograd=("x",),
    dims={"n": (8, 16)},
    draw={"x": NORMAL},
    dtypes=("float32",),
    reduction=("n",),
)


@scheme(reference=lambda x: x.sum(), **OVER_RANKS)
def dist_sum(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(utils.dist_sum(x.sum(), mesh.device_mesh))


@scheme(reference=lambda x: x.sum(), **OVER_RANKS)
def dist_sum_tensor(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return utils.dist_sum_tensor(x.sum(), mesh.device_mesh)


@scheme(reference=lambda x: x.max(), **OVER_RANKS)
def dist_max(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(utils.dist_max(x.max(), mesh.device_mesh))


@scheme(
    reference=lambda x: x * jnp.minimum(1.0, 1.0 / (jnp.sqrt((x**2).sum()) + 1e-6)),
    **{**OVER_RANKS, "outputs": "n/dp", "roundings": 4},
)
def clip_of_sharded_gradients(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(x), mesh.device_mesh, [Shard(0)]))
    parameter.grad = DTensor.from_local(x.clone(), mesh.device_mesh, [Shard(0)])
    utils.clip_grad_norm_([parameter], 1.0)
    return parameter.grad.to_local()


@scheme(reference=lambda x: jnp.sqrt((x**2).sum()), **{**OVER_RANKS, "roundings": 4})
def norm_of_sharded_gradients(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros_like(x), mesh.device_mesh, [Shard(0)]))
    parameter.grad = DTensor.from_local(x.clone(), mesh.device_mesh, [Shard(0)])
    return utils.clip_grad_norm_([parameter], 1.0)
