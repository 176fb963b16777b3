"""Softmax over the last dim.

log_softmax(z) = log p,   softmax(z) = exp(log p),   p as in statistics.py
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_ref.vocab_parallel.statistics import log_probabilities


def log_softmax(logits: Float[Array, "*a v"]) -> Float[Array, "*a v"]:
    """log p_v."""
    return log_probabilities(logits)


def softmax(logits: Float[Array, "*a v"]) -> Float[Array, "*a v"]:
    """p_v."""
    return jnp.exp(log_probabilities(logits))
