"""Next-token log-probabilities where the sequence is stored in an order of its own.

Stored position j is original position seq_index[j]; the result is in original order.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.next_token import next_token_logprob


def next_token_logprob_of_stored(
    logits: Float[Array, "b s v"], target: Int[Array, "b s"], seq_index: Int[Array, " s"], temperature: float = 1.0
) -> Float[Array, "b u"]:
    """log p of id t + 1 at original position t."""
    original = jnp.argsort(seq_index)
    return next_token_logprob(logits[:, original], target[:, original], temperature)
