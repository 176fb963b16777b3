"""The gated delta rule on one device, token by token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def gated_delta_rule(
    query: Float[Array, "b s hk k"],
    key: Float[Array, "b s hk k"],
    value: Float[Array, "b s h v"],
    g: Float[Array, "b s h *k"],
    beta: Float[Array, "b s h"],
    initial_state: Float[Array, "n h k v"],
    cu_seqlens: Int[Array, " q"] | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[Float[Array, "b s h v"], Float[Array, "n h k v"]]:
    """The outputs, and the final state of each sequence.

        S'[t] = exp(g[t]) S[t-1];   S[t] = S'[t] + beta[t] k[t] (v[t] - S'[t]^T k[t])^T;   out[t] = scale S[t]^T q[t]

    Each row is a sequence; with `cu_seqlens` one row has several. Value head i has key head i * hk // h. A decay g is
    one number per head, or one per channel of the key.

    Source: arXiv 2412.06464; decay per channel: 2510.26692.
    """
    b, s, h, _ = value.shape
    k = key.shape[-1]
    if use_qk_l2norm:
        query, key = (x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6) for x in (query, key))
    query = query * (k**-0.5 if scale is None else scale)
    query, key = (jnp.repeat(x, h // key.shape[2], axis=2) for x in (query, key))
    decay = jnp.exp(g if g.ndim == 4 else g[..., None])
    # The sequence of each token: its row, or in a stream the last sequence that starts at or before the token.
    sequence = jnp.arange(b)[:, None] + jnp.zeros((1, s), int)
    if cu_seqlens is not None:
        sequence = jnp.sum(jnp.arange(s)[:, None] >= cu_seqlens[None, 1:], axis=1)[None]

    # Every sequence has a state of its own, and a token changes the state of its sequence.
    def step(states, token):
        q, k, v, decay, beta, sequence = token
        decayed = states[sequence] * decay[..., None]
        found = jnp.einsum("bhkv,bhk->bhv", decayed, k)
        state = decayed + beta[..., None, None] * k[..., :, None] * (v - found)[..., None, :]
        return states.at[sequence].set(state), jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, decay, beta, sequence)]
    final, out = jax.lax.scan(step, initial_state, tuple(tokens))
    return jnp.moveaxis(out, 0, 1), final
