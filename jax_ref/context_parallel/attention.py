"""Attention over whole sequences, dense scores and a mask.

    out[i] = sum_j softmax_j(scale * q[i] . k[j]) v[j]   over the keys j that query i sees

Query i sees key j if both are real tokens of one sequence and the causal and window rules hold, in positions inside it.
Query head i uses KV head i * hk // h. A query that is padding, or sees no key, gives 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Queries = Float[Array, "b h s p"]
Keys = Float[Array, "b hk s p"]


def attention(
    q: Queries, k: Keys, v: Keys, seen: Bool[Array, "s s"], scale: float | None = None
) -> Float[Array, "b h s p"]:
    """`seen[i, j]`: whether query i sees key j."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bhip,bhjp->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("bhij,bhjp->bhip", jnp.where(seen, weights, 0.0), v)


def seen_pairs(
    sequence: Int[Array, " s"],
    position: Int[Array, " s"],
    is_real: Bool[Array, " s"],
    causal: bool = True,
    window: int | None = None,
) -> Bool[Array, "s s"]:
    """Which query sees which key, from the sequence and the place inside it of every token."""
    ahead = position[:, None] - position[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & is_real[:, None] & is_real[None, :]
    seen &= (ahead >= 0) | jnp.logical_not(causal)
    return seen if window is None else seen & (abs(ahead) < window)


def packed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    padded: Int[Array, " n"],
    real: Int[Array, " n"],
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "b h s p"]:
    """Sequence j stands at `padded[j]:padded[j + 1]`; its first `real[j + 1] - real[j]` tokens are no padding."""
    token = jnp.arange(q.shape[2])
    sequence = (token[:, None] >= padded[None, 1:]).sum(1)
    position = token - padded[sequence]
    return attention(
        q, k, v, seen_pairs(sequence, position, position < jnp.diff(real)[sequence], causal, window), scale
    )


def dense_attention(
    q: Queries, k: Keys, v: Keys, causal: bool = True, window: int | None = None, scale: float | None = None
) -> Float[Array, "b h s p"]:
    """All tokens are one sequence."""
    token = jnp.arange(q.shape[2])
    return attention(q, k, v, seen_pairs(0 * token, token, token >= 0, causal, window), scale)
