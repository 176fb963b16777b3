"""Self-attention of whole packed streams: projections, rotary positions, one dense mask."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_ref.context_parallel import packed_attention
from jax_ref.models.config import Config
from jax_ref.models.rotary import rotated


class Attention(nnx.Module):
    """out = o_proj(attention(rotated(q), rotated(k), v)), causal inside each document."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        d, p = config.hidden_size, config.head_dim
        self.head_dim, self.base = p, config.rope_base
        wide, narrow = config.num_attention_heads * p, config.num_key_value_heads * p
        self.q_proj = nnx.Linear(d, wide, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(d, narrow, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(d, narrow, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(wide, d, use_bias=False, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b s d"], padded: Int[Array, " n"], real: Int[Array, " n"]
    ) -> Float[Array, "b s d"]:
        """Document j stands at `padded[j]:padded[j + 1]`, `real[j + 1] - real[j]` tokens of it are no padding."""
        b, s, _ = x.shape
        token = jnp.arange(s)
        position = token - padded[(token[:, None] >= padded[None, 1:]).sum(1)]
        q, k, v = (
            jnp.swapaxes(project(x).reshape(b, s, -1, self.head_dim), 1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, position, self.base), rotated(k, position, self.base)
        out = packed_attention(q, k, v, padded, real)
        return self.o_proj(jnp.swapaxes(out, 1, 2).reshape(b, s, -1))
