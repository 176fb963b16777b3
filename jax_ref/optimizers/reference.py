"""Gradients as one device has them: their norm, and clipping by it. No mesh, no shard, no stage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

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
