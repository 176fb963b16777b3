"""What a row of logits z has to itself: its normaliser and its negative entropy.

    logsumexp(z) = m + log sum_v exp(z_v - m),   m = max_v z_v
    negative_entropy(z) = sum_v p_v log p_v,     p_v = exp(z_v - logsumexp(z)),   0 log 0 = 0

A column of -inf is masked: p = 0. A row that is -inf throughout has no softmax and gives NaN.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def logsumexp(logits: Float[Array, "*a v"]) -> Float[Array, "*a"]:
    """lse = m + log sum_v exp(z_v - m). The shift m is a constant: it cancels in value and gradient."""
    m = lax.stop_gradient(logits.max(-1))
    shift = jnp.where(jnp.isfinite(m), m, 0)
    return shift + jnp.log(jnp.exp(logits - shift[..., None]).sum(-1))


def negative_entropy(logits: Float[Array, "*a v"]) -> Float[Array, "*a"]:
    """h = sum_v p_v log p_v."""
    log_p = logits - logsumexp(logits)[..., None]
    masked = log_p == -jnp.inf
    finite = jnp.where(masked, 0, log_p)  # chosen before exp, so that no gradient meets 0 * inf
    return jnp.where(masked, 0, jnp.exp(finite) * finite).sum(-1)
