"""Causal depthwise convolution along the sequence, which starts anew with each sequence of a stream."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def causal_conv(
    x: Float[Array, "b s c"],
    weight: Float[Array, "k c"],
    bias: Float[Array, " c"] | None = None,
    first: Bool[Array, " s"] | None = None,
) -> Float[Array, "b s c"]:
    """silu(bias + sum over j < k of weight[k - 1 - j] * x[t - j]), of those t - j in t's own sequence.

    `first` marks the first token of each sequence; without it there is one.
    """
    width, size = weight.shape[0], x.shape[1]
    sequence = jnp.zeros(size, jnp.int64) if first is None else jnp.cumsum(first)
    total = jnp.zeros_like(x)
    for back in range(min(width, size)):
        shifted = jnp.concatenate([jnp.zeros_like(x[:, :back]), x[:, : size - back]], axis=1)
        before = jnp.concatenate([jnp.full(back, -1), sequence[: size - back]])
        mine = (before == sequence)[None, :, None]
        total = total + jnp.where(mine, shifted, 0.0) * weight[width - 1 - back][None, None, :]
    return jax.nn.silu(total if bias is None else total + bias[None, None, :])
