"""Rotary positions.

Columns i and i + p/2 of a head are a point of the plane, which position m turns by the angle m * base^(-2 i / p).

Source: arXiv 2104.09864.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotated(x: Float[Array, "b h s p"], position: Int[Array, " s"], base: float) -> Float[Array, "b h s p"]:
    """x, each pair of columns turned."""
    half = x.shape[-1] // 2
    speed = base ** (-2.0 * jnp.arange(half).astype(x.dtype) / x.shape[-1])
    angle = position.astype(x.dtype)[:, None] * speed[None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turn = jnp.stack([jnp.stack([cos, -sin]), jnp.stack([sin, cos])])  # [to, from, s, i]
    points = x.reshape(*x.shape[:-1], 2, half)
    return jnp.einsum("ocsi,bhsci->bhsoi", turn, points).reshape(x.shape)
