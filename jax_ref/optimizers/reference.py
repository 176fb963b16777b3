"""Gradient clipping and optimiser steps on one device, without mesh, shards or stages.

    w   a weight       g   its gradient       t   the number of this step, from 1 on       eta   the learning rate

1. the norm of all gradients, and clipping by it
2. a step of AdamW, a step of SGD
3. a step of Muon

A step takes a weight with its state and returns the new weight and state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jax_ref.stored import stored

# 1. The norm of all gradients, and clipping by it.

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def norm(gradients: dict[str, Float[Array, "..."]], norm_type: float) -> Float[Array, ""]:
    """(sum_i |g_i|^p)^(1/p) over all elements of all gradients; max_i |g_i| for p = inf."""
    flat = jnp.concatenate([jnp.ravel(gradient) for gradient in jax.tree.leaves(gradients)])
    return jnp.linalg.norm(flat, norm_type)


def clipped(
    gradients: dict[str, Float[Array, "..."]], max_norm: float, norm_type: float
) -> tuple[Float[Array, ""], dict[str, Float[Array, "..."]]]:
    """The norm, and the gradients times min(1, max_norm / (norm + 1e-6))."""
    total = norm(gradients, norm_type)
    scale = jnp.minimum(1.0, max_norm / (total + EPSILON))
    return total, jax.tree.map(lambda gradient: gradient * scale, gradients)


# 2. AdamW and SGD.


def adamw(
    weight: Float[Array, "*a"],
    gradient: Float[Array, "*a"],
    mean: Float[Array, "*a"],
    mean_square: Float[Array, "*a"],
    t: int,
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Float[Array, "*a"], Float[Array, "*a"], Float[Array, "*a"]]:
    """(w, m, v) after step t; arXiv 1711.05101, with the decay also times the learning rate, as in torch and optax.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    w <- w - eta (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + lambda w)
    """
    b1, b2 = betas
    mean = b1 * mean + (1 - b1) * gradient
    mean_square = b2 * mean_square + (1 - b2) * gradient**2
    direction = mean / (1 - b1**t) / (jnp.sqrt(mean_square / (1 - b2**t)) + eps)
    return weight - lr * (direction + weight_decay * weight), mean, mean_square


def sgd(
    weight: Float[Array, "*a"],
    gradient: Float[Array, "*a"],
    momentum_buffer: Float[Array, "*a"],
    *,
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> tuple[Float[Array, "*a"], Float[Array, "*a"]]:
    """(w, b) after a step; the decay is added to the gradient and so enters the momentum.

    d = g + lambda w,   b <- mu b + d,   w <- w - eta b,   with Nesterov w <- w - eta (d + mu b)
    """
    decayed = gradient + weight_decay * weight
    momentum_buffer = momentum * momentum_buffer + decayed
    direction = decayed + momentum * momentum_buffer if nesterov else momentum_buffer
    return weight - lr * direction, momentum_buffer


# 3. Muon.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of https://kellerjordan.github.io/posts/muon/
MIN_NORM = 1e-7  # a matrix with a smaller norm is divided by this


def newton_schulz(x: Float[Array, "*b m n"], steps: int = 5) -> Float[Array, "*b m n"]:
    """Bring each matrix's singular values near 1: map s to a s + b s^3 + c s^5, `steps` times.

    X <- X / ||X||,   then   X <- a X + (b A + c A^2) X   with   A = X X^T
    """
    a, b, c = COEFFICIENTS
    x = x / jnp.maximum(jnp.sqrt((x**2).sum((-2, -1), keepdims=True)), MIN_NORM)
    for _ in range(steps):
        gram = x @ x.swapaxes(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon(
    weight: Float[Array, "*b m n"],
    gradient: Float[Array, "*b m n"],
    momentum_buffer: Float[Array, "*b m n"],
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    rows: Sequence[int] | None = None,
    steps: int = 5,
) -> tuple[Float[Array, "*b m n"], Float[Array, "*b m n"]]:
    """(w, b) after a step, arXiv 2502.16982; `rows` splits the gradient into matrices that are updated separately.

    b <- mu b + (1 - mu) g,   d = b,   with Nesterov d = mu b + (1 - mu) g
    w <- w - eta (0.2 sqrt(max(m, n)) newton_schulz(d) + lambda w)
    """
    momentum_buffer = stored(momentum * momentum_buffer + (1 - momentum) * gradient)
    direction = stored(momentum * momentum_buffer + (1 - momentum) * gradient) if nesterov else momentum_buffer
    borders = [sum(rows[: i + 1]) for i in range(len(rows) - 1)] if rows else []
    matrices = jnp.split(direction, borders, axis=-2)
    update = [stored(_scale(*x.shape[-2:]) * stored(newton_schulz(x, steps))) for x in matrices]
    return weight - lr * (jnp.concatenate(update, axis=-2) + weight_decay * weight), momentum_buffer


def _scale(m: int, n: int) -> float:
    """The factor that gives an orthogonal matrix a root mean square of 0.2, about the size of AdamW's update."""
    return 0.2 * math.sqrt(max(m, n))
