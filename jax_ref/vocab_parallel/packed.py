"""Log-probability of the next token of each sequence of a packed stream, one sequence at a time.

    out[i, j] = log p(id[c_i + j + 1] | z[c_i + j])   for j + 1 < the length of sequence i, else 0

c_i is where sequence i starts in the stream.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ref.vocab_parallel.logprob import logprob


def packed_next_token_logprob(
    logits: Float[Array, "1 t v"],
    target: Int[Array, "1 t"],
    starts: Int[Array, " b"],
    lengths: Int[Array, " b"],
    unpacked_seqlen: int,
    temperature: float = 1.0,
) -> Float[Array, "b u"]:
    """Row i: sequence i, of `lengths[i]` tokens from `starts[i]` on, alone."""
    j = jnp.arange(unpacked_seqlen - 1)
    rows = []
    for i in range(len(starts)):
        has_next = j + 1 < lengths[i]
        here = jnp.where(has_next, starts[i] + j, 0)
        row = logprob(logits[0, here], jnp.where(has_next, target[0, here + 1], -1), temperature)
        rows.append(row)
    return jnp.stack(rows)
