"""Log-probability of a token from the hidden state that predicts it.

z[b, t] = h[t, b] W^T
out[b, t] = log p(token | z[b, t])
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.logprob import logprob
from jax_ref.vocab_parallel.next_token import next_token_logprob


def logits(hidden: Float[Array, "s b d"], weight: Float[Array, "v d"]) -> Float[Array, "b s v"]:
    """z."""
    return jnp.einsum("sbd,vd->bsv", hidden, weight)


def linear_logprob(
    hidden: Float[Array, "s b d"], weight: Float[Array, "v d"], target: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """log p of a target that is shifted already."""
    return logprob(logits(hidden, weight), target)


def linear_next_token_logprob(
    hidden: Float[Array, "s b d"], weight: Float[Array, "v d"], target: Int[Array, "b s"]
) -> Float[Array, "b u"]:
    """log p of id t + 1 at position t."""
    return next_token_logprob(logits(hidden, weight), target)
