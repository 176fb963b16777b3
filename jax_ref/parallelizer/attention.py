"""Attention of a decoder layer: projections, optional norm of each head, rotary positions, causal softmax.

    q, k, v = x Wq^T, x Wk^T, x Wv^T;   q, k = R(q), R(k);   y = softmax(q k^T / sqrt(p)) v;   y Wo^T

R turns columns j and j + r/2 of the first r by the angle  position * theta^(-2j/r).
Source: arXiv 2104.09864 (rotary), 2305.13245 (KV groups).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_ref.context_parallel import dense_attention
from jax_ref.parallelizer.layers import Linear, RMSNorm
from jax_ref.parallelizer.traits import DecoderTraits


class Attention(nnx.Module):
    """The layer's parameters under their torch names; q, k and v in one matrix where the family fuses them."""

    def __init__(self, traits: DecoderTraits, window: int | None):
        self.traits, self.window = traits, window
        p = traits.head_width
        queries, keys = traits.heads * p, traits.kv_heads * p
        if traits.is_fused:
            self.qkv_proj = Linear(traits.width, queries + 2 * keys)
        else:
            self.q_proj = Linear(traits.width, queries, traits.qkv_bias)
            self.k_proj = Linear(traits.width, keys, traits.qkv_bias)
            self.v_proj = Linear(traits.width, keys, traits.qkv_bias)
        self.o_proj = Linear(queries, traits.width, traits.out_bias)
        if traits.has_qk_norm:
            self.q_norm, self.k_norm = RMSNorm(p, traits.eps), RMSNorm(p, traits.eps)

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        q, k, v = (_heads(part, self.traits.head_width) for part in self._projected(x))
        if self.traits.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotated(part, self.traits.rotated, self.traits.rope_theta) for part in (q, k))
        q, k, v = (part.swapaxes(1, 2) for part in (q, k, v))
        y = dense_attention(q, k, v, window=self.window)
        return self.o_proj(y.swapaxes(1, 2).reshape(*x.shape[:2], -1))

    def _projected(self, x: Float[Array, "b s d"]) -> list[Array]:
        if not self.traits.is_fused:
            return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        queries, keys = (count * self.traits.head_width for count in (self.traits.heads, self.traits.kv_heads))
        return jnp.split(self.qkv_proj(x), [queries, queries + keys], axis=-1)


def rotated(x: Float[Array, "b s h p"], columns: int, theta: float) -> Float[Array, "b s h p"]:
    """The first `columns` of each head turned by their position's angles."""
    rate = theta ** (-jnp.arange(0, columns, 2).astype(x.dtype) / columns)
    angle = jnp.arange(x.shape[1]).astype(x.dtype)[:, None] * rate[None, :]
    cos, sin = (part[None, :, None, :] for part in (jnp.cos(angle), jnp.sin(angle)))
    first, second, rest = jnp.split(x, [columns // 2, columns], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _heads(x: Float[Array, "b s i"], width: int) -> Float[Array, "b s h p"]:
    return x.reshape(*x.shape[:2], -1, width)
