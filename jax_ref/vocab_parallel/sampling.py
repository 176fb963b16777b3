"""Log-probability of a token t among the tokens that a sampler keeps.

    log p[t] = y_t - log sum_{v kept} exp(y_v),   y = z / temperature
    log p[t] = -inf where t is filtered,   0 where t is nobody's

What is kept is a constant: no gradient goes through the choice.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.kept_set import kept_set
from jax_ref.vocab_parallel.logprob import logprob


def sampled_logprob(
    logits: Float[Array, "*a v"],
    target: Int[Array, "*a"],
    top_k: int | None,
    top_p: float | None,
    temperature: float = 1.0,
) -> Float[Array, "*a"]:
    """log p[t]."""
    kept = kept_set(lax.stop_gradient(logits), top_k, top_p, temperature)
    return logprob(jnp.where(kept, logits, -jnp.inf), target, temperature)
