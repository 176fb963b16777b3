"""NeMo Automodel's losses over sharded logits and over ranks, its gathers with a gradient, and its clipping."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from nemo_automodel.components.distributed.grad_utils import clip_grad_by_total_norm_
from nemo_automodel.components.distributed.utils import reduce_loss
from nemo_automodel.components.loss.dist_utils import all_gather_no_grad, all_gather_with_grad
from nemo_automodel.components.loss.kd_loss import KDLoss
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.moe.experts import _AllGatherConcatVarlenFn

from parity_tests.evidence.peers.mathematics import identity, token_losses
from parity_tests.evidence.peers.strides import CONTIGUOUS
from shardproof import ids, scheme, values

NORMAL = values("normal")
FLOAT32 = dict(dtypes=("float32",), **CONTIGUOUS)
WORLD = {**FLOAT32, "excluded_conditions": (*CONTIGUOUS["excluded_conditions"], "larger_world")}


# Distillation
def divergences(student: Any, teacher: Any, labels: Any, temperature: float) -> Any:
    """KL(teacher, student) of each token that has a label, times the temperature squared."""
    q, p = (jax.nn.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    each = (jnp.exp(p) * (p - q)).sum(-1) * temperature**2
    return jnp.where(labels == -100, 0.0, each)


def _mean(student: Any, teacher: Any, labels: Any, temperature: float) -> Any:
    count = jnp.maximum((labels != -100).sum(), 1).astype(student.dtype)
    return divergences(student, teacher, labels, temperature).sum() / count


def _over_eight(student: Any, teacher: Any, labels: Any, temperature: float) -> Any:
    return divergences(student, teacher, labels, temperature).sum() / 8


DISTILLATION = dict(
    mesh={"tp": (1, 2, 4)},
    inputs={"student": "n v/tp", "teacher": "n v/tp", "labels": "n"},
    outputs="tp=I",
    options={"temperature": (1.0, 2.0)},
    nograd=("teacher",),
    draw={"student": NORMAL, "teacher": NORMAL, "labels": ids("v", ignore=-100)},
    roundings=8,
    reduction=("n", "v"),
    **FLOAT32,
)


@scheme(reference=_mean, **DISTILLATION)
def distillation_mean(mesh: Any, student: Any, teacher: Any, labels: Any, temperature: float) -> torch.Tensor:
    return KDLoss(temperature=temperature, tp_group=mesh["tp"])(student, teacher, labels)


@scheme(reference=_over_eight, **DISTILLATION)
def distillation_of_a_step(mesh: Any, student: Any, teacher: Any, labels: Any, temperature: float) -> torch.Tensor:
    """The sum over tokens, divided by the number of labels in all micro-batches of a step."""
    return KDLoss(temperature=temperature, tp_group=mesh["tp"])(student, teacher, labels, num_batch_labels=8)


# Cross entropy: each rank returns the term of its own rows
ROWS = dict(
    mesh={"dp": (1, 2, 4)},
    inputs={"logits": "n/dp v", "labels": "n/dp"},
    outputs="dp=P",
    draw={"logits": NORMAL, "labels": ids("v", ignore=-100)},
    roundings=4,
    reduction=("n", "v"),
    **FLOAT32,
)


@scheme(reference=lambda logits, labels: token_losses(logits, labels).sum(), **ROWS)
def masked_cross_entropy_sum(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return MaskedCrossEntropy()(logits, labels)


@scheme(reference=lambda logits, labels: token_losses(logits, labels).sum() / 8, **ROWS)
def masked_cross_entropy_of_a_step(mesh: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return MaskedCrossEntropy()(logits, labels, num_label_tokens=8)


@scheme(
    reference=lambda losses: losses.sum(),
    mesh={"dp": (1, 2, 4)},
    inputs={"losses": "n/dp"},
    outputs="dp=I",
    nograd=("losses",),
    draw={"losses": NORMAL},
    reduction=("n",),
    **FLOAT32,
)
def reduce_loss_of_micro_batches(mesh: Any, losses: torch.Tensor) -> torch.Tensor:
    parts = list(losses.split(1)) or [losses.sum()]
    return reduce_loss(parts, torch.tensor(len(losses)), dp_group=mesh["dp"])[0].squeeze(0)


# Gathers
GATHER = dict(reference=identity, mesh={"dp": (1, 2, 4)}, inputs={"x": "n/dp d"}, draw={"x": NORMAL})


@scheme(outputs="n d dp=R", **GATHER, **WORLD)
def gather_with_gradient(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return all_gather_with_grad(x)


@scheme(outputs="n d dp=I", nograd=("x",), **GATHER, **WORLD)
def gather_without_gradient(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    return all_gather_no_grad(x)


@scheme(outputs="n d dp=R", **GATHER, **FLOAT32)
def gather_of_experts(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = [len(x)] * mesh.size("dp")
    return _AllGatherConcatVarlenFn.apply(x, mesh["dp"], lengths, len(x)) * 1


@scheme(
    reference=lambda x, bias: x + bias,
    mesh={"dp": (1, 2, 4)},
    inputs={"x": "n/dp d", "bias": "n d dp=R"},
    outputs="n d dp=R",
    draw={"x": NORMAL, "bias": NORMAL},
    **FLOAT32,
)
def gather_of_experts_beside_a_term(mesh: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The sum hands one gradient to both of its terms."""
    term = bias * 1
    gathered = _AllGatherConcatVarlenFn.apply(x, mesh["dp"], [len(x)] * mesh.size("dp"), len(x))
    return (gathered + term) * 1


# Clipping
def _clip_reference(gradient: Any) -> Any:
    return gradient * jnp.minimum(1.0, 1.0 / (jnp.sqrt((gradient**2).sum()) + 1e-6))


def _declare(dtype: str) -> None:
    def clip(mesh: Any, gradient: torch.Tensor) -> torch.Tensor:
        norm = gradient.float().square().sum()
        torch.distributed.all_reduce(norm, group=mesh["dp"])
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        clip_grad_by_total_norm_([parameter], 1.0, norm.sqrt().item())
        return parameter.grad

    clip.__name__ = f"clip_{dtype}_gradients"
    scheme(
        reference=_clip_reference,
        mesh={"dp": (1, 2, 4)},
        inputs={"gradient": "n/dp"},
        outputs="n/dp",
        nograd=("gradient",),
        dims={"n": (16, 32)},
        draw={"gradient": NORMAL},
        dtypes=(dtype,),
        roundings=4,
        reduction=("n",),
        excluded_conditions=CONTIGUOUS["excluded_conditions"],
    )(clip)


for _dtype in ("float32", "bfloat16"):
    _declare(_dtype)
