"""What happens between a gradient and the next weights, as one device has it. No mesh, no shard, no stage.

    w   a weight       g   its gradient       t   the number of this step, from 1 on       eta   the learning rate

1. the norm of all gradients, and clipping by it
2. a step of AdamW, of SGD

A step takes a weight with its state and returns both as they are after it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

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
    """(w, m, v) after step t, arXiv 1711.05101 with the learning rate on the decay too, as torch and optax have it.

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
    """(w, b) after a step; the decay is added to the gradient, so that the momentum has it too.

    d = g + lambda w,   b <- mu b + d,   w <- w - eta b,   with Nesterov w <- w - eta (d + mu b)
    """
    decayed = gradient + weight_decay * weight
    momentum_buffer = momentum * momentum_buffer + decayed
    direction = decayed + momentum * momentum_buffer if nesterov else momentum_buffer
    return weight - lr * direction, momentum_buffer
