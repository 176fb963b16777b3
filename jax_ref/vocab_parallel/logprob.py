"""Log-probability of a target token under the softmax of z / temperature.

    log p[t] = y[t] - lse(y),   y = z / temperature,   lse(y) = log sum_v exp(y_v)

An id outside [0, V) is nobody's: its score is 0 and has no gradient.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.statistics import log_probabilities, negative_entropy


def logprob(logits: Float[Array, "*a v"], target: Int[Array, "*a"], temperature: float = 1.0) -> Float[Array, "*a"]:
    """log p[t]."""
    known = (target >= 0) & (target < logits.shape[-1])
    asked = jnp.where(known[..., None], logits, 0)  # chosen before the softmax: an unasked row has no gradient
    log_p = log_probabilities(asked, temperature)
    at_target = jnp.take_along_axis(log_p, jnp.where(known, target, 0)[..., None], axis=-1)
    return jnp.where(known, at_target[..., 0], 0)


def logprob_and_negative_entropy(
    logits: Float[Array, "*a v"], target: Int[Array, "*a"], temperature: float = 1.0
) -> tuple[Float[Array, "*a"], Float[Array, "*a"]]:
    """(log p[t], sum_v p_v log p_v)."""
    return logprob(logits, target, temperature), negative_entropy(logits, temperature)
