"""Softmax over the last dim.

log_softmax(z)_v = z_v - lse(z),   softmax(z)_v = exp(z_v - lse(z)),   lse(z) = log sum_v exp(z_v)
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_ref.vocab_parallel.statistics import logsumexp


def log_softmax(logits: Float[Array, "*a v"]) -> Float[Array, "*a v"]:
    """log p_v = z_v - lse."""
    return logits - logsumexp(logits)[..., None]


def softmax(logits: Float[Array, "*a v"]) -> Float[Array, "*a v"]:
    """p_v = exp(z_v - lse)."""
    return jnp.exp(log_softmax(logits))
