"""The k largest logits of each row, and logits at given ids."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def topk(logits: Float[Array, "*a v"], k: int) -> tuple[Float[Array, "*a k"], Int[Array, "*a k"]]:
    """(values, ids), descending, of equal values the lowest id first; min(k, V) of them. -0 equals 0."""
    values, ids = lax.top_k(jnp.where(logits == 0, 0, logits), min(k, logits.shape[-1]))
    return values, ids


def logits_at(logits: Float[Array, "*a v"], ids: Int[Array, "*a k"]) -> Float[Array, "*a k"]:
    """z[ids[j]]; 0 without gradient where the id is outside [0, V)."""
    known = (ids >= 0) & (ids < logits.shape[-1])
    return jnp.where(known, jnp.take_along_axis(logits, jnp.where(known, ids, 0), axis=-1), 0)
