"""Log-probability of the next token of a sequence.

    out[b, t] = log p(id[b, t + 1] | z[b, t]),   t < s - 1

Positions of z past the ids are padding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.logprob import logprob


def next_token_logprob(
    logits: Float[Array, "b l v"], target: Int[Array, "b s"], temperature: float = 1.0
) -> Float[Array, "b u"]:
    """log p of id t + 1 at position t."""
    return logprob(logits[:, : max(target.shape[1] - 1, 0)], target[:, 1:], temperature)


def next_token_logprob_of_stored(
    logits: Float[Array, "b s v"], target: Int[Array, "b s"], seq_index: Int[Array, " s"], temperature: float = 1.0
) -> Float[Array, "b u"]:
    """The same where stored position j is original position seq_index[j]; the result is in original order."""
    original = jnp.argsort(seq_index)
    return next_token_logprob(logits[:, original], target[:, original], temperature)
