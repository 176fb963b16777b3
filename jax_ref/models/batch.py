"""What each token of a packed stream is to predict, document by document.

Document j stands at `padded[j]:padded[j + 1]`; its first `real[j + 1] - real[j]` tokens are real. A token's target is
the next real token of its own document; the last has none.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def next_ids(
    ids: Int[Array, " t"], padded: Int[Array, " n"], real: Int[Array, " n"]
) -> tuple[Int[Array, " t"], Bool[Array, " t"]]:
    """(the next id, whether there is one), of each token."""
    token, targets, is_there = jnp.arange(len(ids)), jnp.zeros_like(ids), jnp.zeros(len(ids), bool)
    for j in range(len(padded) - 1):
        last = padded[j] + real[j + 1] - real[j] - 1
        has_next = (token >= padded[j]) & (token < last)
        targets = jnp.where(has_next, ids[jnp.minimum(token + 1, len(ids) - 1)], targets)
        is_there |= has_next
    return targets, is_there
