"""Which tokens a sampler keeps of a row.

top-k:  z_v >= the k-th largest of the row; all equal to it stay
top-p:  of those, in the order (z descending, id ascending): the first, and each one with
        sum_before exp((z - m) / temperature) < p sum_all exp((z - m) / temperature),   m = max_v z_v
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def kept_set(
    logits: Float[Array, "*a v"], top_k: int | None, top_p: float | None, temperature: float = 1.0
) -> Bool[Array, "*a v"]:
    """Top-k, then top-p; off are None, a top_k below 1, and a top_p of 1."""
    kept = jnp.ones(logits.shape, bool)
    if top_k is not None and 0 < top_k < logits.shape[-1]:
        kept = logits >= jnp.sort(logits, axis=-1)[..., -top_k, None]
    if top_p is not None and top_p < 1:
        order = jnp.argsort(-logits, axis=-1, stable=True)
        in_order = jnp.take_along_axis(jnp.where(kept, logits, -jnp.inf), order, axis=-1)
        mass = jnp.exp((in_order - in_order[..., :1]) / temperature)
        upto = jnp.cumsum(mass, axis=-1)
        before = jnp.concatenate([jnp.zeros_like(upto[..., :1]), upto[..., :-1]], axis=-1)
        early = (before < top_p * upto[..., -1:]).at[..., 0].set(True)
        kept &= jnp.take_along_axis(early, jnp.argsort(order, axis=-1), axis=-1)
    return kept
