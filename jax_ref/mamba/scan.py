"""The state space recurrence of Mamba2, token by token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def scan(
    x: Float[Array, "b s h p"],
    dt: Float[Array, "b s h"],
    A: Float[Array, " h"],
    B: Float[Array, "b s g n"],
    C: Float[Array, "b s g n"],
    D: Float[Array, " h"],
    first: Bool[Array, " s"] | None = None,
    initial_states: Float[Array, "b h p n"] | None = None,
) -> tuple[Float[Array, "b s h p"], Float[Array, "b h p n"]]:
    """y[t] = S[t] C[t] + D x[t] and the last S;  S[t] = exp(dt[t] A) S[t-1] + dt[t] x[t] B[t]^T.

    Head i reads group i * g // h. S is 0 before each token marked in `first`, the `initial_states` before token 0.

    Source: arXiv 2405.21060.
    """
    b, s, h, p = x.shape
    groups, n = B.shape[2:]
    group = jnp.arange(h) * groups // h
    state = jnp.zeros((b, h, p, n), x.dtype) if initial_states is None else initial_states
    again = jnp.zeros(s, bool) if first is None else first.at[0].set(False) if s else first

    def step(state, token):
        x, dt, B, C, again = token
        decay = jnp.exp(dt * A[None, :])
        kept = jnp.where(again, jnp.zeros_like(state), state) * decay[:, :, None, None]
        state = kept + jnp.einsum("bh,bhp,bhn->bhpn", dt, x, B[:, group])
        return state, jnp.einsum("bhpn,bhn->bhp", state, C[:, group]) + D[None, :, None] * x

    tokens = [jnp.moveaxis(each, 1, 0) for each in (x, dt, B, C)]
    final, y = jax.lax.scan(step, state, (*tokens, again))
    return jnp.moveaxis(y, 0, 1), final
