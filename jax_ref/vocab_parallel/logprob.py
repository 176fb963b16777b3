"""Log-probability of a target token t under the softmax of y = z / temperature.

    log p[t] = -log(1 + sum_{v != t} exp(y_v - y_t))                   where y_t is the largest
    log p[t] = (y_t - m) - log(sum_v exp(y_v - m)),   m = max_v y_v    elsewhere

The two are one formula; the first keeps all digits of a probability near 1, in value and gradient.
An id outside [0, V) is nobody's: its score is 0 and has no gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.statistics import negative_entropy


def logprob(logits: Float[Array, "*a v"], target: Int[Array, "*a"], temperature: float = 1.0) -> Float[Array, "*a"]:
    """log p[t]."""
    known = (target >= 0) & (target < logits.shape[-1])
    asked = jnp.where(known[..., None], logits, 0)  # chosen before the softmax: an unasked row has no gradient
    below = (asked - lax.stop_gradient(asked.max(-1, keepdims=True))) / temperature
    is_target = jax.nn.one_hot(target, logits.shape[-1], dtype=bool)
    others = jnp.where(is_target, 0, jnp.exp(below)).sum(-1)
    own = jnp.where(is_target, below, 0).sum(-1)
    is_largest = own == 0
    largest = -jnp.log1p(others * jnp.exp(-jnp.where(is_largest, own, 0)))
    smaller = own - jnp.log(others + jnp.exp(own))
    return jnp.where(known, jnp.where(is_largest, largest, smaller), 0)


def logprob_and_negative_entropy(
    logits: Float[Array, "*a v"], target: Int[Array, "*a"], temperature: float = 1.0
) -> tuple[Float[Array, "*a"], Float[Array, "*a"]]:
    """(log p[t], sum_v p_v log p_v)."""
    return logprob(logits, target, temperature), negative_entropy(logits, temperature)
